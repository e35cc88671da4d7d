"""The base that adapters are put onto, read anew for each test."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


@pytest.fixture
def make_base(tiny_target: Path) -> Callable[[], PreTrainedModel]:
    """Return a fresh copy of the base each time it is called."""
    return lambda: AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.fixture
def base(make_base: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return make_base()
