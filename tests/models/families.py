"""Tiny targets of many families, with random weights: what people may bring."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM, PretrainedConfig

from models.targets.random import byte_tokenizer

HIDDEN = 128  # of two heads: 64 is the least that vLLM's attention takes on a CPU
TOKENIZER = byte_tokenizer()
_COMMON: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "bos_token_id": TOKENIZER.bos_token_id,
    "eos_token_id": TOKENIZER.eos_token_id,
    "pad_token_id": TOKENIZER.pad_token_id,
    "initializer_range": 0.08,  # as of the target "random"
}
_PLAIN = {
    **_COMMON,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 1}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# model_type to the keys of its configuration.
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 64},
    "gpt2": {**_COMMON, "n_embd": HIDDEN, "n_layer": 2, "n_head": 2, "n_positions": 512},
    "gpt_neox": _PLAIN,
    "phi": _PLAIN,
    "phi3": _GROUPED,
    "granite": {**_GROUPED, "logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.5},
    "qwen3_moe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "gemma": {**_GROUPED, "head_dim": 64},
    "gemma2": {**_GROUPED, "head_dim": 64, "final_logit_softcapping": 0.5},
    "olmo2": _GROUPED,
}
# Those that read images too, and what their language model is.
MULTIMODAL = {"gemma3": "gemma3_text", "llava": "llama"}


def write_family(model_type: str, directory: Path) -> Path:
    """Write a target of a family, with a tokenizer and a chat template, and return the directory."""
    kind: Any = AutoModelForCausalLM
    if model_type in MULTIMODAL:
        text = {**_GROUPED, "head_dim": 64}
        kind, config = AutoModelForMultimodalLM, _of(model_type, text_config=_of(MULTIMODAL[model_type], **text))
    elif model_type == "t5":
        kind = AutoModelForSeq2SeqLM
        config = _of("t5", **_COMMON, d_model=HIDDEN, d_kv=64, d_ff=128, num_layers=2, num_heads=2)
    else:
        config = _of(model_type, **CAUSAL[model_type])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind.from_config(config).save_pretrained(directory)
    TOKENIZER.save_pretrained(directory)
    return directory


def _of(model_type: str, **keys: Any) -> PretrainedConfig:
    if model_type == "gemma3":
        keys |= {"vision_config": _VISION, "mm_tokens_per_image": 4}
    elif model_type == "llava":
        keys |= {"vision_config": transformers.CLIPVisionConfig(**_VISION)}
    return transformers.AutoConfig.for_model(model_type, **keys)
