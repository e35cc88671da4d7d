"""What the target says of a draft's tokens, from its last residual stream, which is cheaper to keep than logits.

Letters: N rows, H the target's hidden width, V its vocabulary, D the draft's.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from models.checkpoint import output_embedding, read_tensor
from models.drafts import Draft


class Teacher(NamedTuple):
    """The target's last norm and the rows of its head that the draft can propose."""

    norm: Tensor
    eps: float
    head: Tensor

    @classmethod
    def read(cls, draft: Draft, target_dir: Path) -> "Teacher":
        """Read what turns the target's last residual stream into probabilities of the draft's tokens."""
        config = json.loads((target_dir / "config.json").read_text())
        norm = read_tensor(target_dir, "model.norm.weight").float()
        vocabulary = draft.vocabulary
        head = output_embedding(target_dir)[vocabulary.cpu()].to(vocabulary.device)
        return cls(norm.to(vocabulary.device), config["rms_norm_eps"], head)

    def normed(self, states: Tensor) -> Tensor:
        """[N, H] last residual stream → [N, H] what the output matrix multiplies."""
        return torch.nn.functional.rms_norm(states.float(), states.shape[-1:], self.norm, self.eps)

    def probs(self, normed: Tensor, log_sums: Tensor) -> Tensor:
        """[N, H] normed states, [N] → [N, D] probabilities, not normalised over D."""
        return (normed @ self.head.T - log_sums[:, None]).exp()


def draft_ids(draft: Draft, target_dir: Path) -> Tensor:
    """[V] each target id's place in the draft's vocabulary, −1 for those that are not in it."""
    vocab_size = json.loads((target_dir / "config.json").read_text())["vocab_size"]
    vocabulary = draft.vocabulary
    ids = torch.full((vocab_size,), -1, device=vocabulary.device)
    ids[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
    return ids
