"""What a DREAM draft keeps of a text.

Letters as in `dream.draft`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]  # keys and values
Pairs = list[Pair]  # of each layer


class DreamCache(NamedTuple):
    """What a draft knows of B texts of T tokens, of which layers 0 and 2 hold m.

    Attributes:
        places: [m] where these stand.
        gone: [B, m] the place from which rows see each no more.
        text: keys and values [B, ·, kv heads, width] of each layer; layer 1 has all T.
        images: [B, T] whether a token is an image's.
        keys: [B, T, kv heads, width] that the target's last watched layer looks at; none without images.
    """

    places: Tensor
    gone: Tensor
    text: Pairs
    images: Tensor
    keys: Tensor


def joined(before: Pair, new: Pair) -> Pair:
    """Put keys and values behind others, along axis 1."""
    return torch.cat([before[0], new[0]], dim=1), torch.cat([before[1], new[1]], dim=1)
