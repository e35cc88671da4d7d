"""Distillation losses: `loss(draft_logits [N, D], target_probs [N, D], params) -> [N]`.

`target_probs` are the target's probabilities of the draft's D tokens, not normalised over them: what is missing from 1
is the mass that the draft can't propose.
"""
