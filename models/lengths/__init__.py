"""Length policies: how many tokens to draft next.

Each file has `num_draft_tokens(steps, limit, params)`: `steps` are (drafted, accepted) of one sequence's verification
steps so far, `limit` is the engine's K; the answer is from 0 to `limit`.
"""
