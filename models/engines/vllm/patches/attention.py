"""Attention layers of an engine on CPUs in one call without Python.

vLLM 0.32 calls Python twice in each layer, once to write its keys and values and once to attend, to look up what the
step is about. Here a step tells its facts once for all layers, and `attention.cpp` calls the two operators that vLLM's
Python would. Layers of other kinds stay vLLM's: encoders, fp8, sinks, alibi, and layers that share another one's cache
or hand theirs on to other engines.

Replaces: `vllm.model_executor.layers.attention.Attention.__init__`,
    `vllm.model_executor.layers.attention.Attention.forward`, `vllm.forward_context.override_forward_context`.
Tried with: vLLM 0.32.
No hook: a platform names the class of an attention backend; what calls it twice a layer is the layer itself.
Without it: 2.5 ms more of a forward pass of 9 (SmolLM2-135M, one sequence, two cores of an AMD EPYC).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm import forward_context
from vllm.config import get_current_vllm_config
from vllm.forward_context import ForwardContext
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from models.engines.vllm import native_build
from models.engines.vllm.patches import replace


class _Layers:
    """The layers of this process that attend in one call, and the caches that they were told of."""

    def __init__(self) -> None:
        self.all: list[Any] = []  # in the order they were made; a layer's place is its number
        self.numbers: dict[str, int] = {}  # by the layers' names
        self.caches: dict[int, Tensor] = {}  # as far as told

    def add(self, layer: Any) -> int:
        number = self.numbers[layer.layer_name] = len(self.all)
        self.all.append(layer)
        return number

    def begin(self, context: ForwardContext) -> None:
        """Tell what a forward pass is about; without metadata the engine is warmed up, and nothing attends."""
        torch.ops.redraft.end_step(context.attn_metadata is None)
        metadata_of: Any = context.attn_metadata or {}
        slots_of: Any = context.slot_mapping
        steps: dict[int, tuple[Any, Tensor | None, list[int]]] = {}  # layers of one group share their metadata
        for name, metadata in metadata_of.items():
            if (number := self.numbers.get(name)) is not None:
                self.tell_cache(number)
                steps.setdefault(id(metadata), (metadata, slots_of.get(name), []))[2].append(number)
        for metadata, slots, numbers in steps.values():
            torch.ops.redraft.begin_step(
                numbers,
                metadata.num_actual_tokens,
                metadata.causal,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.scheduler_metadata,
                slots,
                metadata.dynamic_causal,
            )

    def tell_cache(self, number: int) -> None:
        """Tell where a layer's keys and values are, unless that was told."""
        layer = self.all[number]
        if self.caches.get(number) is layer.kv_cache:
            return
        num_blocks, num_heads, block_size, _ = layer.kv_cache.shape
        keys, values = layer.kv_cache.view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)
        impl = layer.impl
        torch.ops.redraft.set_layer(
            number,
            keys,
            values,
            layer.isa,
            impl.kv_cache_dtype,
            impl.scale,
            impl.logits_soft_cap,
            layer._k_scale_float,
            layer._v_scale_float,
            impl.sliding_window,
        )
        self.caches[number] = layer.kv_cache


_layers = _Layers()


def tell_cache(layer: Any) -> None:
    """Tell where a layer's keys and values are that attends in one call, for who calls its operator without it."""
    _layers.tell_cache(layer.redraft_number)


def install() -> None:
    """Let layers that are made from now on attend so where they can; before a model is loaded."""
    if current_platform.is_cpu():
        replace(Attention, "__init__", _make)
        replace(Attention, "forward", _attend)
        replace(forward_context, "override_forward_context", _override)


def _make(own: Callable[..., None], layer: Any, *args: Any, **options: Any) -> None:
    own(layer, *args, **options)
    layer.redraft_number = _layers.add(layer) if _suits(layer) and _is_built() else None


def _attend(
    own: Callable[..., Tensor], layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
) -> Tensor:
    if layer.redraft_number is None or key is None or value is None or args or options:
        return own(layer, query, key, value, *args, **options)
    output = torch.empty_like(query).view(-1, layer.num_heads, layer.head_size)
    query = query.view(-1, layer.num_heads, layer.head_size)
    key, value = (part.view(-1, layer.num_kv_heads, layer.head_size) for part in (key, value))
    torch.ops.redraft.attend(query, key, value, output, layer.redraft_number)
    return output.view(-1, layer.num_heads * layer.head_size)


@contextmanager
def _override(own: Callable[..., AbstractContextManager[None]], context: ForwardContext | None) -> Iterator[None]:
    with own(context):
        if context is not None and _layers.all:
            _layers.begin(context)
        yield


def _suits(layer: Any) -> bool:
    """Whether a layer is of the kind that `attention.cpp` knows."""
    impl = layer.impl
    return (
        type(impl) is CPUAttentionBackendImpl
        and get_current_vllm_config().kv_transfer_config is None
        and impl.attn_type == AttentionType.DECODER
        and layer.kv_sharing_target_layer_name is None
        and impl.alibi_slopes is None
        and impl.sinks is None
        and layer.query_quant is None
        and layer.head_size_v == layer.head_size
        and not impl.is_fp8_kv_cache
    )


@cache
def _is_built() -> bool:
    built = native_build.is_loaded(native_build.ATTENTION, "attention is called from Python")
    if built:
        torch.library.register_fake("redraft::attend", lambda query, key, value, output, layer: None)
    return built
