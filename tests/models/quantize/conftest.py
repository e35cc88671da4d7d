"""What tests of quantization share."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture
def model(tiny_target: Path) -> PreTrainedModel:
    """The two-layer target in float32, to be used up."""
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.fixture
def documents() -> list[list[int]]:
    """Four documents of 48 random tokens."""
    return torch.randint(3, 259, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
