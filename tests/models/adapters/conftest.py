"""The base that adapters are put onto, read anew for each test."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel


@pytest.fixture
def make_base(tiny_target: Path) -> Callable[[], PreTrainedModel]:
    """Return a fresh copy of the base each time it is called."""
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.fixture
def base(make_base: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return make_base()


@pytest.fixture
def smollm2_shape() -> LlamaForCausalLM:
    """A model of the default target's shape, without weights: to count on."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).requires_grad_(False)
