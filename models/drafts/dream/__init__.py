"""DREAM: a draft of three layers, the middle one of which reads the target's features by cross-attention.

    a(t) = layer₀ [E(x(1)) … E(x(t+1))]
    c(t) = a(t) + tanh(g₁) · attention(a(t); f(≤ t)),   then + tanh(g₂) · MLP
    f̂(t+1) = layer₂ [c(≤ t)],   q = softmax(W_out f̂)

f is what the target's output matrix W_out multiplies; of drafted tokens f̂ stands in its place. Both gates start at 0.
Layer 0 has no norm before its attention; queries and keys of layer 1 are normed head by head and not turned.

c is trained to be an intermediate feature of the target too: of the streams before a few of its layers, at each token
the one whose layer looks at the text with the least entropy (`dream.watched`). The code takes them from layer 1 to two
fifths of all; here at most four of these, as each is kept on disk for training. Streams grow with depth, so both sides
are brought to one size. What remains is EAGLE's loss in the code's proportions, 1 : 0.2 : 1 of c, f̂ and q, with noise
on f.

Of images, which are runs of tokens from `image_tokens`, half is read on (`dream.draft`): keys and values of layers 0
and 2, of which most of a long image prompt is made. The code judges by the target's attention too and leaves tokens out
before they are read; here an image is read whole once, so that training and engine do the same however a text comes in
pieces. The paper's draft is for models that see; this one works on any target whose image tokens are in its vocabulary.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field

from models.core.drafting.borrowing import Format
from models.core.drafting.features import start_as
from models.drafts.dream.draft import Dream
from models.params import BaseParams, unread
from models.targets import target_config

PAPER = "arXiv:2505.19201; github.com/SAI-Lab-NYU/DREAM"
ARCHITECTURES = ("DreamDraft",)
SERVED = False
MOST_LAYERS, DEPTH = 4, 0.4  # of streams that an intermediate feature is chosen from


class Params(BaseParams):
    """Shape of a new draft, and what it is trained with.

    Attributes:
        vocab_size: D, at most the target's.
        noise: features are off by up to this in training, each entry by itself.
        middle_layers: streams that an intermediate feature is chosen from, counted as layers done; by default up to
            four in the first two fifths.
        middle_weight: what the distance to it counts beside that to the feature.
        image_tokens: the first and the last of the target's tokens that are an image's; None for no images.
        image_share: of an image's tokens, how much is read on.
    """

    name: Literal["dream"] = "dream"
    vocab_size: int = Field(4096, ge=1)
    noise: float = Field(0.1, ge=0)
    middle_layers: tuple[int, ...] | None = None
    middle_weight: float = Field(5.0, ge=0)
    image_tokens: tuple[int, int] | None = None
    image_share: float = Field(0.5, gt=0, le=1)
    _images = unread("image_share", when=lambda params: params.image_tokens is None, why="there are no image_tokens")


_format = Format("dream", ARCHITECTURES, Dream)
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Dream:
    """Make a draft of the target's first layer and, twice, its last, to which features say nothing yet; see
    `models.drafts.Family`."""
    num_layers = target_config(target_dir).num_hidden_layers
    own = {
        "feature_noise": params.noise,
        "middle_layers": list(default_middle(num_layers) if params.middle_layers is None else params.middle_layers),
        "middle_weight": params.middle_weight,
        "image_tokens": None if params.image_tokens is None else list(params.image_tokens),
        "image_share": params.image_share,
    }
    draft = _format.start(params.vocab_size, own, target_dir, token_counts)
    with torch.no_grad():
        for layer, number in zip(draft.layers, (0, num_layers - 1, num_layers - 1), strict=True):
            start_as(layer, target_dir, number)
        draft.norm.weight.copy_(draft.target_norm)
    return draft


def default_middle(num_layers: int) -> tuple[int, ...]:
    """Return up to four streams, from that after the first layer to that after two fifths; one at least."""
    last = min(max(1, int(DEPTH * num_layers)), num_layers - 1)
    first = min(1, last)
    steps = (round(first + (last - first) * number / (MOST_LAYERS - 1)) for number in range(MOST_LAYERS))
    return tuple(sorted(set(steps)))
