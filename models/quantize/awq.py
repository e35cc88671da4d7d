"""AWQ: input features that carry much are scaled up before rounding, and their inputs scaled down by as much.

W·x = (W·diag(s)) · (diag(s)⁻¹·x), with s = (mean |x|)^α and α searched from 0 in steps of 1/20 for the least squared
error of the outputs. diag(s)⁻¹ goes into whatever makes the inputs: the norm before, or the rows of v_proj (for o_proj)
and up_proj (for down_proj), so that the result is a plain checkpoint.

Layers that read the same inputs share s. Where several heads read one value head, o_proj's s is the mean over them;
the authors' code leaves o_proj out then. After that each group is clipped to the share of its range, from 1 down to
0.5, that loses least, except in q_proj and k_proj, whose products meet each other. Errors are those of a layer's own
outputs, not of the whole block. Grids have zero points by default, as the authors' have.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.checkpoints import compressed
from models.core.layers.integers import Integers
from models.core.layers.linears import Block, Rows, blocks, calibrate, linears
from models.quantize import Grid, Quantized, assemble, check, check_documents
from models.targets import MODEL_TYPES

PAPER = "arXiv:2306.00978, section 3"
CALIBRATED = True
STORED = compressed.PACKED
STEPS = 20
# What makes the inputs, and the layers that read them.
FOLDS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
UNCLIPPED = ("self_attn.q_proj", "self_attn.k_proj")


class Params(Grid):
    """The grid and the search."""

    name: Literal["awq"] = "awq"
    symmetric: bool = False
    search_tokens: int = Field(
        128, ge=1, description="calibration tokens that errors are measured on, spread over the text."
    )
    clip: bool = Field(True, description="whether ranges are clipped.")


CORNERS = (Params(group_size=32, symmetric=True),)


def quantize(model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params) -> Quantized:
    """Scale and round weights block by block on the inputs that come through those before; see `models.quantize`."""
    check(model, params.group_size)
    check_documents(documents)
    _require_layout(model)
    parts: dict[str, dict[str, Tensor]] = {}
    caught: dict[str, Rows] = {}

    def visit(name: str, layer: nn.Linear, read: Rows) -> None:
        _, _, index, leaf = name.split(".", 3)
        caught[leaf] = read
        if len(caught) == sum(len(readers) for _, readers in FOLDS):
            for own, weight in _block(blocks(model)[int(index)], caught, params).items():
                parts[f"model.layers.{index}.{own}"] = compressed.packed_parts(weight, params.bits)
            caught.clear()

    calibrate(model, documents, Rows, visit)
    return assemble(model, parts, params.scheme)


def _require_layout(model: PreTrainedModel) -> None:
    known = {leaf for _, readers in FOLDS for leaf in readers}
    found = {name for name, _ in linears(model)}
    wanted = {f"model.layers.{index}.{leaf}" for index in range(len(blocks(model))) for leaf in known}
    if found - wanted:
        name = min(found - wanted)
        raise ValueError(f"layer {name} is not of Llama's layout; awq does not know what makes its inputs")
    if wanted - found:
        raise ValueError(f"layer {min(wanted - found)} is missing; awq takes blocks of Llama's layout")
    if model.config.model_type not in MODEL_TYPES:  # norms of others add 1 to their weight, or stand elsewhere
        raise ValueError(f"awq takes models of type {', '.join(MODEL_TYPES)}; got {model.config.model_type}")


def _block(block: Block, caught: Mapping[str, Rows], params: Params) -> dict[str, Integers]:
    """Scale, clip and round the layers of one block in place; `caught` is what each of them read."""
    inputs = {}
    for maker_name, readers in FOLDS:
        maker = block.get_parameter(f"{maker_name}.weight")
        weights = [block.get_parameter(f"{leaf}.weight") for leaf in readers]
        found = caught[readers[0]].inputs.float()
        rows = found[:: max(1, len(found) // params.search_tokens)][: params.search_tokens]
        # Where several heads read one value head, the features of a value head are shared.
        head = 1 if len(maker) == found.shape[1] else block.self_attn.head_dim
        shape = (len(maker) // head, -1, head)
        magnitudes = found.abs().mean(0).view(shape).mean(1, keepdim=True)
        scale = _search(weights, rows, magnitudes, params)
        makers = scale.flatten()
        maker.div_(makers if maker.ndim == 1 else makers[:, None])
        if (bias := getattr(block.get_submodule(maker_name), "bias", None)) is not None:
            bias.div_(makers)
        spread = _spread(scale, found.shape[1])
        for leaf, weight in zip(readers, weights, strict=True):
            weight.mul_(spread)
            inputs[leaf] = rows / spread
    rounded = {}
    for leaf, rows in inputs.items():
        weight = block.get_parameter(f"{leaf}.weight")
        clip = params.clip and leaf not in UNCLIPPED
        rounded[leaf] = _clipped(weight, rows, params) if clip else params.round(weight)
        weight.copy_(rounded[leaf].floats())
    return rounded


def _search(weights: Sequence[Tensor], rows: Tensor, magnitudes: Tensor, params: Params) -> Tensor:
    """Return the best scale of the features, [heads, 1, width of a head] as `magnitudes`."""
    best, least = torch.ones_like(magnitudes), float("inf")
    for step in range(STEPS):
        scale = magnitudes.clamp(min=1e-4) ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        spread = _spread(scale, rows.shape[1])
        errors = (params.round(weight * spread).floats() / spread - weight for weight in weights)
        error = sum(float((rows @ wrong.T).square().sum()) for wrong in errors)
        if error < least:
            best, least = scale, error
    return best


def _spread(scale: Tensor, width: int) -> Tensor:
    """[heads, 1, width of a head] to [I], each head's features once for every head that reads them."""
    return scale.expand(-1, width // scale.numel(), -1).flatten()


def _clipped(weight: Tensor, rows: Tensor, params: Params) -> Integers:
    """Round with each group's range cut to the share of it that loses least of the layer's outputs."""
    size = params.group_size
    groups = weight.unflatten(1, (-1, size))
    inputs = rows.unflatten(1, (-1, size))
    products = torch.einsum("ngi,ngj->gij", inputs, inputs)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if params.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    best = groups
    least = torch.full(groups.shape[:2], torch.inf, device=weight.device)
    for step in range(STEPS // 2):
        share = 1 - step / STEPS
        cut = groups.clamp(share * low, share * high)
        wrong = params.round(cut.flatten(1)).floats().unflatten(1, (-1, size)) - groups
        error = torch.einsum("ogi,gij,ogj->og", wrong, products, wrong)
        best = torch.where((error < least)[..., None], cut, best)
        least = torch.minimum(error, least)
    return params.round(best.flatten(1))
