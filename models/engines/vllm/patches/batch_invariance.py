"""A row of the target has the same bits whatever else is in its step, on CPUs: `[engine] batch_invariant`.

What a row's bits depend on otherwise, and what is done:

**Products.** oneDNN adds in another order for another number of rows. `small_batch_gemm` multiplies all rows of all
layers, those of prompts too, since generated tokens read their keys.

**Attention.** vLLM's kernel reads keys in tiles, as long as its cache has room for beside the query's rows, and divides
a prompt's rows among threads by what else is in the step. So the sums of a prompt beyond some 600 tokens depend on how
it was cut, and those of verified rows on how many they are. Here it is told of each few rows as of a sequence of their
own, which makes tiles of one length. Of a prompt of 1,500 tokens that was cut otherwise, 58 of 500 rows had other bits;
it takes as long with 9 heads over 3, and 1.5 times as long with 8 over 2 (an AMD EPYC).

Norms, rotations and gates are computed by rows. Sums over ranks were not looked at, so one rank is wanted.

Replaces: `vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder.build`.
Tried with: vLLM 0.32.
No hook: vLLM's own mode (`VLLM_BATCH_INVARIANT`) puts Triton's kernels in place, which a CPU has not.
Without it: answers are equal for one stream only, as far as `small_batch_gemm` says.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

from models.engines.vllm import native_build
from models.engines.vllm.patches import replace, small_batch_gemm

HEADS = 8  # query heads that the kernel multiplies at once on any processor


def install() -> None:
    """Let attention of a batch-invariant engine be told of few rows at a time."""
    if current_platform.is_cpu():
        replace(CPUAttentionMetadataBuilder, "build", _build)


def require(model: nn.Module) -> None:
    """Raise ValueError if a layer of the target may be computed by a kernel that depends on other rows."""
    for name, layer in model.named_modules():
        if isinstance(layer, AttentionLayerBase):
            impl = getattr(layer, "impl", None)
            suits = type(impl) is CPUAttentionBackendImpl and impl.attn_type == AttentionType.DECODER
        else:
            suits = not _multiplies(layer) or isinstance(layer, nn.Embedding) or hasattr(layer, small_batch_gemm.FORM)
        if not suits:
            kind = type(layer).__name__
            raise ValueError(f"[engine] batch_invariant: {name} ({kind}) has no batch-invariant kernel on a CPU")


def _multiplies(layer: nn.Module) -> bool:
    has_matrix = any(one.ndim > 1 and one.numel() for one in layer.parameters(recurse=False))
    return has_matrix or isinstance(layer, LinearBase | VocabParallelEmbedding)


def _build(
    own: Callable[..., Any], builder: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
) -> Any:
    if native_build.is_batch_invariant() and common_attn_metadata.causal is True:
        num = rows_at_once(builder.num_heads // builder.num_kv_heads)
        common_attn_metadata = by_few_rows(common_attn_metadata, num)
    return own(builder, common_prefix_len, common_attn_metadata, fast_build)


def rows_at_once(heads_per_kv: int) -> int:
    """Return how many rows are one tile of the kernel, which takes heads one by one where they don't fill it evenly."""
    return HEADS // heads_per_kv if HEADS % heads_per_kv == 0 else HEADS


def by_few_rows(common: Any, num: int) -> Any:
    """Return a step's facts with `num` rows at most of each sequence; one with more becomes several."""
    borders, lengths = common.query_start_loc, common.seq_lens
    counts = borders.diff()
    if int(counts.max()) <= num:
        return common
    parts = (counts + num - 1) // num
    whose = torch.arange(len(counts)).repeat_interleave(parts)
    part = torch.arange(len(whose)) - (parts.cumsum(0) - parts)[whose]
    starts = borders[whose] + part.int() * num
    ends = torch.minimum(starts + num, borders[whose + 1])
    return common.replace(
        num_reqs=len(whose),
        max_query_len=num,
        query_start_loc=torch.cat((starts, ends[-1:])),
        seq_lens=lengths[whose] - (borders[whose + 1] - ends),
        block_table_tensor=common.block_table_tensor[whose],
    )
