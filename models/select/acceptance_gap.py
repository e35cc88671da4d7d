"""Acceptance gap: the documents of which the current draft is accepted least. Ours; the draft is the proxy.

A confident draft may be wrong and an unsure one right, while acceptance Σ min(p, q) asks how far the draft is from the
target, which is what its training can close. It needs no start: there is a current draft, or an untrained one.
"""

from typing import Literal

from models.params import BaseParams
from models.select import by_score

PAPER = "none: ours, after arXiv:1906.11829 with the draft in place of the proxy"
NEEDS_START = False
DRAFTS = True
TRAINS = True


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["acceptance_gap"] = "acceptance_gap"


pick = by_score(lambda proxy: -proxy.acceptance)
