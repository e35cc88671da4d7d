"""Width: heads, KV heads, MLP channels and the hidden width are cut by how strongly they fire on calibration text.

Importance of a query head is the L2 norm of its output before the output projection, of an MLP channel the absolute
value of what the down projection reads, of a hidden channel the absolute value of what the norms hand on, summed over
all of them, since the residual stream has one width in all blocks. Each is averaged over a document's tokens and then
L2-normed over documents, Minitron's choice. Heads and channels are chosen block by block. The paper counts KV heads as
given; here a KV head counts as its best query heads together, of as many as stay with it.

Nothing is trained again and no weight is scaled, so a model with a much narrower hidden width is broken until it is.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.core.layers.reshape import Kept, head_dim, take_widths
from models.params import TrainingParams
from models.shrink import Measured, Widths, choose, choose_heads, norms, pieces, read, shape_of, wanted_shape

PAPER = "arXiv:2407.14679, section 2.2 (Minitron)"
KEEPS_TOKENS = True


class Params(Measured, Widths):
    """The widths that are asked for."""

    name: Literal["width"] = "width"


CORNERS = (Params(intermediate_size=128), Params(hidden_size=128, num_heads=2, num_kv_heads=1))


def shrink(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params, training: TrainingParams, seed: int = 0
) -> PreTrainedModel:
    """Return a narrower model; see `models.shrink`."""
    has, shape = shape_of(model), wanted_shape(model, params)
    heads, channels, hidden = importance(model, pieces(documents, params, training, seed))
    together = heads.topk(shape.num_heads // shape.num_kv_heads, dim=-1).values.sum(dim=-1)
    kept_heads, kept_kv_heads = choose_heads(heads, together, shape)
    kept = Kept(
        hidden=None if shape.hidden_size == has.hidden_size else choose(hidden, shape.hidden_size),
        heads=kept_heads,
        kv_heads=kept_kv_heads,
        channels=choose(channels, shape.intermediate_size),
    )
    return take_widths(model, kept)


def importance(model: PreTrainedModel, documents: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the importance of heads [L, K, A/K], MLP channels [L, C] and hidden channels [H]."""
    shape, width = shape_of(model), head_dim(model.config)
    heads = torch.zeros(shape.num_layers, shape.num_heads)
    channels = torch.zeros(shape.num_layers, shape.intermediate_size)
    hidden = torch.zeros(shape.hidden_size)

    def add(sums: Tensor, of_token: Callable[[Tensor], Tensor], states: Tensor) -> None:
        sums += of_token(states.float()).mean(dim=(0, 1)).cpu().square()

    def head_norms(states: Tensor) -> Tensor:
        found: Tensor = states.unflatten(-1, (-1, width)).norm(dim=-1)
        return found

    hooks = [
        norm.register_forward_hook(lambda module, args, output: add(hidden, torch.abs, output)) for norm in norms(model)
    ]
    for number, block in enumerate(blocks(model)):
        for module, sums, of_token in (
            (block.self_attn.o_proj, heads[number], head_norms),
            (block.mlp.down_proj, channels[number], torch.abs),
        ):
            fires = partial(add, sums, of_token)
            hooks.append(module.register_forward_pre_hook(lambda module, args, fires=fires: fires(args[0])))
    read(model, documents, hooks)
    return heads.sqrt().unflatten(1, (shape.num_kv_heads, -1)), channels.sqrt(), hidden.sqrt()
