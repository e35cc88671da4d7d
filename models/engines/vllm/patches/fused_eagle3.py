"""All passes of an EAGLE-3 draft in one call without Python, on CPUs.

A pass of such a draft reads a few MB, and what stands around its products took longer than they. For the few rows of
steps that generate, `fused_eagle3.cpp` makes a whole proposal: it combines the target's states, writes keys, makes each
pass and chooses its token, by the noise that the target will have where it is sampled. Only the last of a sequence's
tokens goes beyond its keys and values in the first pass: nothing reads the other outputs.

Products are those of `small_batch_gemm`, with the weights packed there, and keys lie where `attention` reads them. The
rest is rounded where vLLM's operators round, but a sum may differ in its last bit, and so may a token at a near-tie;
the target verifies it in any case. Drafts of other kinds, those that are not packed, and prompts stay vLLM's.

Replaces: `vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose`, which `proposer` calls where this
    leaves a proposal to it.
Tried with: vLLM 0.32.
No hook: vLLM's proposer calls the draft's model once a pass, from Python.
Without it: three passes take 2.7 ms instead of 0.7, and 12 instead of 0.9 where other processes keep both cores busy
    (a draft of 7 million weights for SmolLM2-135M, one sequence, two cores of an AMD EPYC; a plain step takes 8.7).
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from models.engines.vllm import native_build
from models.engines.vllm.patches import attention, small_batch_gemm
from models.engines.vllm.patches.sampling import Noise

NUMBER = 0  # of the draft, among those of this process
WITHOUT = "each pass of the draft is called from Python"

log = logging.getLogger(__name__)


class FusedDraft:
    """The draft of a proposer, and the weights that `fused_eagle3.cpp` was told of."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._told: list[Any] = []

    @classmethod
    def of(cls, drafter: Any) -> "FusedDraft | None":
        """Return that of a proposer of vLLM's; None where it has another draft than an EAGLE-3 Llama layer."""
        if type(getattr(drafter, "model", None)) is not Eagle3LlamaForCausalLM:
            return None
        try:
            return cls(drafter) if _suits(drafter) and _is_built() else None
        except AttributeError as error:
            log.warning("%s: vLLM has another layout: %s", WITHOUT, error)
            return None

    def propose(
        self, num_tokens: int, step: Mapping[str, Any], noise: Noise | None, least: Tensor | None = None
    ) -> tuple[Tensor, Tensor] | None:
        """Return the draft's tokens [B, num_tokens] as vLLM's proposer does, and chances; None leaves it to that.

        A chance [B, num_tokens] is the draft's own that a sequence's tokens up to there are all right: the product of
        their probabilities, at the noise's temperatures. One that is below `least` [B] float32 ends the sequence's
        chain: what would follow is -1. Without `least` all are 1.
        `step` is what vLLM's `propose` gets, and `noise` of the first tokens; without it they are the likeliest.
        """
        drafter, metadata, token_ids = self._drafter, step["common_attn_metadata"], step["target_token_ids"]
        if len(token_ids) > small_batch_gemm.limit() or metadata.causal is not True or not self._tell():
            return None
        attention.tell_cache(drafter.model.model.layers[0].self_attn.attn)
        proposal: tuple[Tensor, Tensor] = torch.ops.redraft.propose(
            NUMBER,
            num_tokens,
            token_ids,
            step["next_token_ids"],
            step["target_positions"],
            step["target_hidden_states"],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table_tensor,
            metadata.slot_mapping[: len(token_ids)],
            *((None, None, None) if noise is None else noise),
            least,
        )
        return proposal

    def _tell(self) -> bool:
        """Tell of the weights that are loaded now, unless that was done; return whether all are packed."""
        model = self._drafter.model
        layer = model.model.layers[0]
        modules = (
            model.model.fc,
            layer.self_attn.qkv_proj,
            layer.self_attn.o_proj,
            layer.mlp.gate_up_proj,
            layer.mlp.down_proj,
            model.lm_head,
        )
        forms: list[Any] = [getattr(module, small_batch_gemm.FORM, None) for module in modules]
        if forms == self._told:
            return True
        if None in forms:
            return False
        builder = self._drafter.draft_attn_groups[0].get_metadata_builder()
        attn, token_ids = layer.self_attn.attn, torch.arange(model.logits_processor.org_vocab_size)
        if model.draft_id_to_target_id is not None:
            token_ids = token_ids + model.draft_id_to_target_id
        torch.ops.redraft.set_draft(
            NUMBER,
            [part for form in forms for part in (form.packed, form.scales, form.product.handler_tensor)],
            [form.product.n for form in forms],
            [
                model.model.embed_tokens.weight,
                layer.input_layernorm.weight,
                layer.hidden_norm.weight,
                layer.post_attention_layernorm.weight,
                model.model.norm.weight,
                layer.self_attn.rotary_emb.cos_sin_cache,
                token_ids,
            ],
            [
                attn.redraft_number,
                attn.num_heads,
                attn.num_kv_heads,
                attn.head_size,
                builder.window_size,
                self._drafter.block_size,
                self._drafter.max_model_len,
            ],
            layer.input_layernorm.variance_epsilon,
            builder.isa,
            builder.kv_cache_dtype,
            envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        self._told = forms
        return True


def _suits(drafter: Any) -> bool:
    """Whether an EAGLE-3 draft is computed as `fused_eagle3.cpp` computes it."""
    model, sizes = drafter.model, drafter.draft_model_config.hf_config
    if len(model.model.layers) != 1 or get_tensor_model_parallel_world_size() > 1:
        return False
    layer = model.model.layers[0]
    attn, rotary = layer.self_attn.attn, layer.self_attn.rotary_emb
    linears = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    return (
        getattr(attn, "redraft_number", None) is not None
        and type(rotary).forward_cpu is RotaryEmbedding.forward_cpu
        and (rotary.is_neox_style, rotary.rotary_dim) == (True, attn.head_size)
        and all(linear.bias is None for linear in linears)
        and layer._residual_norm == layer._norm_after_residual
        and model.model.use_aux_hidden_state
        and not (model.model.norm_before_fc or model.model.fc_norm or model.model.norm_output)
        and (model.logits_processor.scale, model.logits_processor.soft_cap) == (1.0, None)
        and model.model.embed_tokens.weight.dtype == torch.bfloat16
        and not (drafter.parallel_drafting or drafter.uses_mrope or drafter.use_heterogeneous_vocab)
        and not drafter.supports_mm_inputs
        and sizes.hidden_act == "silu"
    )


@cache
def _is_built() -> bool:
    return all(native_build.is_loaded(file, WITHOUT) for file in (native_build.SAMPLING, native_build.FUSED_EAGLE3))
