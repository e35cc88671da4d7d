"""Attention and products of a batch-invariant engine give a row the same bits, however the step was cut."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder, _get_attn_isa

from models.engines.vllm import Params
from models.engines.vllm.launch import INVARIANT_GPU, Speculation, require_invariance
from models.engines.vllm.native_build import INVARIANT
from models.engines.vllm.patches import batch_invariance, small_batch_gemm

pytestmark = pytest.mark.engine

BLOCK, WIDTH = 32, 64
LENGTHS = (1500, 700)  # of a sequence, and of another beside it; beyond what vLLM's kernel reads in one tile


class Layer:
    """One layer's attention over a cache, by vLLM's operators and the facts that its builder makes of a step."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.isa = _get_attn_isa(torch.bfloat16, BLOCK, WIDTH)
        shapes = (num_heads, num_kv_heads, num_kv_heads)
        self.told = [
            [torch.randn(length, num, WIDTH, generator=draw).bfloat16() for num in shapes] for length in LENGTHS
        ]
        num_blocks = [-(-length // BLOCK) for length in LENGTHS]
        cache = torch.zeros(sum(num_blocks), num_kv_heads, 2 * BLOCK, WIDTH, dtype=torch.bfloat16)
        self.keys, self.values = cache.chunk(2, dim=2)
        self.blocks = torch.zeros(2, max(num_blocks), dtype=torch.int32)
        self.blocks[0, : num_blocks[0]] = torch.arange(num_blocks[0])
        self.blocks[1, : num_blocks[1]] = torch.arange(num_blocks[0], sum(num_blocks))
        self.builder: Any = SimpleNamespace(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=WIDTH,
            dtype=torch.bfloat16,
            window_size=-1,
            block_size=BLOCK,
            kv_cache_dtype="auto",
            isa=self.isa,
            is_cross_attention=False,
            is_encoder_only_attention=False,
        )

    def step(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """Attend for rows `first` to `last` of sequences; return each one's outputs."""
        told = [[one[first:last] for one in self.told[sequence]] for sequence, first, last in parts]
        query, key, value = (torch.cat(rows) for rows in zip(*told, strict=True))
        which = torch.tensor([sequence for sequence, _, _ in parts])
        counts = [last - first for _, first, last in parts]
        borders = torch.tensor([0, *counts]).cumsum(0).int()
        places = [torch.arange(first, last) for _, first, last in parts]
        slots = [
            self.blocks[s][at // BLOCK].long() * BLOCK + at % BLOCK for (s, _, _), at in zip(parts, places, strict=True)
        ]
        common = CommonAttentionMetadata(
            query_start_loc=borders,
            query_start_loc_cpu=borders,
            seq_lens=torch.tensor([last for _, _, last in parts], dtype=torch.int32),
            num_reqs=len(parts),
            num_actual_tokens=len(query),
            max_query_len=max(counts),
            max_seq_len=max(LENGTHS),
            block_table_tensor=self.blocks[which],
            slot_mapping=torch.cat(slots),
        )
        metadata = CPUAttentionMetadataBuilder.build(self.builder, common_prefix_len=0, common_attn_metadata=common)
        ops.cpu_attn_reshape_and_cache(key, value, self.keys, self.values, metadata.slot_mapping, self.isa)
        output = torch.empty_like(query)
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=self.keys,
            value_cache=self.values,
            output=output,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            scale=WIDTH**-0.5,
            causal=metadata.causal,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=metadata.block_table,
            softcap=0.0,
            scheduler_metadata=metadata.scheduler_metadata,
            s_aux=None,
        )
        return list(output.split(counts))


@pytest.fixture
def invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUAttentionMetadataBuilder, "build", CPUAttentionMetadataBuilder.build)
    monkeypatch.setenv(INVARIANT, "1")
    batch_invariance.install()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (8, 2)])  # one by one, and four that share keys
@pytest.mark.usefixtures("invariant")
def test_a_row_attends_with_the_same_bits_however_its_prompt_was_cut_and_whatever_is_beside_it(
    num_heads: int, num_kv_heads: int
) -> None:
    layer = Layer(num_heads, num_kv_heads)
    (whole,) = layer.step([(0, 0, LENGTHS[0])])
    cuts = (0, 130, 137, 900, 1400, LENGTHS[0])
    for first, last in pairwise(cuts):
        beside = (1, max(0, first - 900), min(LENGTHS[1], max(1, last - 900)))
        got, _ = layer.step([(0, first, last), beside])
        assert torch.equal(got, whole[first:last]), (first, last)
    for num in (1, 4, 9):  # as tokens are generated, and verified
        got, _ = layer.step([(0, LENGTHS[0] - num, LENGTHS[0]), (1, 3, 500)])
        assert torch.equal(got, whole[-num:])


@pytest.mark.parametrize("counts", [[1, 9], [8, 20, 1], [0, 17]])
def test_a_sequence_of_many_rows_becomes_several_that_end_where_its_rows_do(counts: list[int]) -> None:
    borders = torch.tensor([0, *counts]).cumsum(0).int()
    lengths = torch.tensor([100 + 10 * at for at in range(len(counts))], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=borders,
        query_start_loc_cpu=borders,
        seq_lens=lengths,
        num_reqs=len(counts),
        num_actual_tokens=sum(counts),
        max_query_len=max(counts),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.arange(len(counts))[:, None].int(),
        slot_mapping=torch.arange(sum(counts)),
    )
    cut = batch_invariance.by_few_rows(common, 8)
    assert (cut.query_start_loc.dtype, cut.seq_lens.dtype) == (torch.int32, torch.int32)
    seen = []
    for at, last in enumerate(cut.seq_lens.tolist()):
        num = int(cut.query_start_loc[at + 1] - cut.query_start_loc[at])
        assert 1 <= num <= cut.max_query_len == 8
        seen += [(int(cut.block_table_tensor[at, 0]), position) for position in range(last - num, last)]
    wanted = [(s, int(lengths[s]) - num + at) for s, num in enumerate(counts) for at in range(num)]
    assert seen == wanted and cut.num_reqs == len(cut.seq_lens) == len(cut.query_start_loc) - 1


def test_a_target_with_a_layer_of_another_kernel_is_refused_by_its_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 8)})
    with pytest.raises(ValueError, match=r"\[engine\] batch_invariant: up \(Linear\) has no batch-invariant kernel"):
        batch_invariance.require(model)
    setattr(model["up"], small_batch_gemm.FORM, "packed")
    batch_invariance.require(model)


def test_it_is_refused_where_no_kernel_is_and_where_only_the_environment_asks(monkeypatch, tmp_path) -> None:
    wanted = Speculation(tmp_path, None, Params(batch_invariant=True), "float32", True, None)
    fault = r"\[engine\] batch_invariant: wanted bfloat16, a processor with AVX512_BF16 and one rank on a CPU, got "
    with pytest.raises(ValueError, match=fault + "float32, "):
        require_invariance(wanted)
    two = Params(batch_invariant=True, extra={"tensor_parallel_size": 2})
    with pytest.raises(ValueError, match=fault + "bfloat16, one .*, 2$"):
        require_invariance(wanted._replace(dtype="bfloat16", params=two))
    require_invariance(wanted._replace(on_gpu=True))  # where vLLM says what it can't
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match=fault + "bfloat16, one without, 1"):
        require_invariance(wanted._replace(dtype="bfloat16"))
    require_invariance(wanted._replace(params=Params()))
    monkeypatch.setenv(INVARIANT_GPU, "1")
    with pytest.raises(ValueError, match=f"{INVARIANT_GPU} is 1, wanted 0 or nothing: set .engine. batch_invariant"):
        require_invariance(wanted._replace(params=Params()))
