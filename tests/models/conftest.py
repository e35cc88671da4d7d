"""What tests of models share beside the two-layer target."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.targets import random


@pytest.fixture
def model(tiny_target: Path) -> PreTrainedModel:
    """The two-layer target, read anew for each test."""
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A four-layer Llama with random weights."""
    directory = tmp_path_factory.mktemp("deep")
    random.build(random.Params(num_layers=4), directory)
    return directory
