"""What the target answered, as it is; a draft sees the text that it will be asked to go on with."""

from typing import Literal

from models.params import BaseParams

PAPER = "arXiv:1606.07947, section 3.2; for drafts arXiv:2411.11055"
WRITES = LOGGED = False


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["target"] = "target"
