"""PEARL: the draft drafts on while the target reads, so that neither waits for the other.

While the target reads what follows the last certain token, the draft drafts K more. If tokens wait to be verified, the
target reads them in that pass (post-verify) and the draft goes on behind them as if they were right; if none wait, the
draft's first new token is verified by what the target says after the last certain one (pre-verify), so that a token
that is wrong is found out at once and one that is right costs no pass of its own. In either case the first of the new
tokens is verified at the end of the step and the others wait; where one is rejected, all behind it are thrown away.

So a chunk grows for as long as the draft is right, and a step takes the longer of K passes of the draft and one of the
target, not their sum. A step that keeps all of its tokens has none of the target's own, so τ counts its last token as
that.
"""

from typing import Literal

from models.lengths import all_tokens
from models.params import BaseParams

PAPER = "arXiv:2408.11850"
OVERLAPS = True


class Params(BaseParams):
    """Nothing to set; K, best what the draft says in the time of a pass of the target, is the engine's."""

    name: Literal["pearl"] = "pearl"


num_draft_tokens = all_tokens
