"""Acceptance gap: the documents of which the current draft is accepted least. Ours; the draft is the proxy.

A confident draft may be wrong and an unsure one right, while acceptance Σ min(p, q) asks how far the draft is from the
target, which is what its training can close. It needs no start: there is a current draft, or an untrained one.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from models.params import BaseParams
from models.select import Proxy, highest

PAPER = "none: ours, after arXiv:1906.11829 with the draft in place of the proxy"
NEEDS_START = False
DRAFTS = True
TRAINS = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["acceptance_gap"] = "acceptance_gap"


def pick(proxy: Proxy, chosen: Sequence[int], num_wanted: int, params: Params, rng: torch.Generator) -> list[int]:
    """Pick the documents with the smallest mean accepted length; see `models.select`."""
    return highest(-proxy.acceptance, chosen, num_wanted)
