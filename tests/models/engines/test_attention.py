"""Layers that attend in one call compute what vLLM's own do, and leave alone what is none of theirs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder, _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec

from models.engines.vllm.patches import attention

pytestmark = pytest.mark.engine

HEADS, KV_HEADS, WIDTH, BLOCK, NUM_BLOCKS = 4, 2, 64, 32, 6
# Tokens that each sequence of a step computes, and how many it has with them: a prompt, verified tokens, a single one.
NEW, LENGTHS = (40, 4, 1), (40, 70, 9)
BLOCKS = ((0, 1, 0), (2, 3, 4), (5, 0, 0))


@pytest.fixture(autouse=True, scope="module")
def _tiles() -> None:
    """Ask the kernel for AMX's tiles, as a worker does: without them vLLM's attention is an illegal instruction."""
    torch.cpu._init_amx()


@pytest.fixture
def config(tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The config of an engine whose layers attend in one call, and none of another test's layers."""
    attention.install()
    monkeypatch.setattr(attention, "_layers", attention._Layers())
    model = ModelConfig(model=str(tiny_target), max_model_len=128, dtype="bfloat16")
    made = VllmConfig(model_config=model, cache_config=CacheConfig(block_size=BLOCK))
    with set_current_vllm_config(made):
        yield made


def layer_of(config: Any, name: str, **options: Any) -> Any:
    """Return a layer with a cache of its own, which the seed fills."""
    layer = Attention(HEADS, WIDTH, WIDTH**-0.5, KV_HEADS, cache_config=config.cache_config, prefix=name, **options)
    values = torch.Generator().manual_seed(0)
    layer.kv_cache = torch.randn(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * WIDTH, generator=values).bfloat16()
    return layer


def metadata_of(config: Any, layer: Any) -> Any:
    """Return the metadata of a step and where its tokens' keys go."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=WIDTH, dtype=torch.bfloat16)
    builder = CPUAttentionMetadataBuilder(spec, [layer.layer_name], config, torch.device("cpu"))
    steps = zip(BLOCKS, NEW, LENGTHS, strict=True)
    places = [row[at // BLOCK] * BLOCK + at % BLOCK for row, new, end in steps for at in range(end - new, end)]
    common = SimpleNamespace(
        num_reqs=len(NEW),
        num_actual_tokens=sum(NEW),
        max_query_len=max(NEW),
        max_seq_len=max(LENGTHS),
        query_start_loc=torch.tensor([0, *NEW]).cumsum(0).int(),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table_tensor=torch.tensor(BLOCKS, dtype=torch.int32),
        slot_mapping=torch.tensor(places),
        causal=True,
    )
    return builder.build(0, common)


def run(config: Any, layer: Any, metadata: Any = None) -> Tensor:
    """Return a layer's outputs in a step, which may have the metadata of other layers too."""
    name, metadata = layer.layer_name, metadata or metadata_of(config, layer)
    with set_forward_context({name: metadata}, config, slot_mapping={name: metadata.slot_mapping}):
        outputs: Tensor = layer(*inputs_of())
    return outputs


def inputs_of() -> tuple[Tensor, Tensor, Tensor]:
    num, values = sum(NEW), torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(num, n * WIDTH, generator=values).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    return query, key, value


@pytest.mark.parametrize("options", [{}, {"per_layer_sliding_window": 16}, {"logits_soft_cap": 5.0}])
def test_a_layer_writes_and_attends_as_vllms_own(config: Any, options: dict[str, Any]) -> None:
    own, ours = layer_of(config, "model.layers.0.attn", **options), layer_of(config, "model.layers.1.attn", **options)
    assert (own.redraft_number, ours.redraft_number) == (0, 1)
    own.redraft_number = None  # it is vLLM's from here on
    cache = ours.kv_cache.clone()
    outputs = [run(config, layer) for layer in (own, ours)]
    assert torch.equal(*outputs)
    assert torch.equal(own.kv_cache, ours.kv_cache)
    assert not torch.equal(ours.kv_cache, cache)
    assert outputs[0].shape == (sum(NEW), HEADS * WIDTH)


def test_a_layer_attends_by_the_cache_that_it_has_now(config: Any) -> None:
    layer = layer_of(config, "model.layers.0.attn")
    metadata = metadata_of(config, layer)
    first = run(config, layer, metadata)
    layer.kv_cache = torch.zeros_like(layer.kv_cache)
    second = run(config, layer, metadata)
    assert not torch.equal(first, second)
    assert torch.equal(first[: NEW[0]], second[: NEW[0]])  # a prompt sees nothing but itself


def test_layers_of_two_models_take_turns(config: Any) -> None:
    target, draft = layer_of(config, "model.layers.0.attn"), layer_of(config, "draft.layers.0.attn")
    metadata = metadata_of(config, target)
    metadata_of(config, draft)  # tells the layer how it computes
    wanted = run(config, target, metadata)
    before = draft.kv_cache.clone()
    run(config, draft, metadata)
    assert not torch.equal(draft.kv_cache, before)
    assert torch.equal(run(config, target, metadata), wanted)


def test_without_metadata_nothing_is_written(config: Any) -> None:
    layer = layer_of(config, "model.layers.0.attn")
    run(config, layer)
    before = layer.kv_cache.clone()
    query, key, value = inputs_of()
    with set_forward_context(None, config):
        assert layer(query, key + 1, value).shape == query.shape
    assert torch.equal(layer.kv_cache, before)


def test_a_layer_that_a_step_tells_nothing_of_is_refused(config: Any) -> None:
    told, untold = (layer_of(config, f"model.layers.{number}.attn") for number in range(2))
    run(config, untold)
    with set_forward_context({told.layer_name: metadata_of(config, told)}, config, slot_mapping={}):
        told(*inputs_of())
        with pytest.raises(ValueError, match="layer 1 attends in a step that tells nothing of it"):
            untold(*inputs_of())


def test_a_layer_of_another_kind_stays_vllms(config: Any) -> None:
    layer = layer_of(config, "model.layers.0.attn", alibi_slopes=[0.5] * HEADS)
    assert layer.redraft_number is None
    assert not torch.equal(run(config, layer), run(config, layer_of(config, "model.layers.1.attn")))


def test_layers_whose_caches_are_handed_on_stay_vllms(config: Any) -> None:
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert layer_of(config, "model.layers.0.attn").redraft_number is None


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_layers_stay_vllms_and_it_is_said(config: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert layer_of(config, "model.layers.0.attn").redraft_number is None
    assert "attention is called from Python" in caplog.text


@pytest.mark.parametrize("num_keys", [100, 1000, 5000])
def test_a_row_attends_to_the_same_bits_alone_as_beside_those_verified_with_it(num_keys: int) -> None:
    threads, isa = torch.get_num_threads(), _get_attn_isa(torch.bfloat16, BLOCK, WIDTH)
    num_blocks, draw = -(-num_keys // BLOCK), torch.Generator().manual_seed(0)
    cache = torch.zeros(num_blocks, KV_HEADS, 2 * BLOCK, WIDTH).bfloat16()
    keys, values = cache.chunk(2, dim=2)
    query, key, value = (
        torch.randn(num_keys, n, WIDTH, generator=draw).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)
    )
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(num_keys), isa)
    blocks = torch.arange(num_blocks, dtype=torch.int32)[None]

    def attend(first: int, end: int) -> Tensor:
        """Return the outputs [rows, heads, width] of a sequence's last rows."""
        borders, length = torch.tensor([0, end - first], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        split, rows = envs.VLLM_CPU_ATTN_SPLIT_KV, query[first:end]
        outputs = torch.empty_like(rows)
        plan = ops.cpu_attn_get_scheduler_metadata(
            1, HEADS, KV_HEADS, WIDTH, length, torch.bfloat16, borders, True, -1, isa, split
        )
        ops.cpu_attention_with_kv_cache(
            rows, keys, values, outputs, borders, length, WIDTH**-0.5, True, None, -1, blocks, 0.0, plan, None
        )
        return outputs

    torch.set_num_threads(2)
    try:
        together = attend(num_keys - 9, num_keys)
        alone = [attend(at, at + 1)[0] for at in range(num_keys - 9, num_keys)]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together, torch.stack(alone))
