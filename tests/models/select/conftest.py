"""Documents that a small model learns at once, with others among them that nothing predicts."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.core.learning import training
from models.params import TrainingParams
from models.select import Sources

HARD = range(5, 40, 7)


@pytest.fixture(scope="session")
def hard() -> set[int]:
    """Places of the planted documents."""
    return set(HARD)


@pytest.fixture(scope="session")
def planted_pool() -> list[list[int]]:
    """Forty documents that count, five of them noise instead."""
    rng = torch.Generator().manual_seed(0)
    pool = [[3 + (start + place) % 60 for place in range(16)] for start in range(40)]
    for place in HARD:
        pool[place] = torch.randint(3, 259, (16,), generator=rng).tolist()
    return pool


@pytest.fixture(scope="session")
def planted_sources(tiny_target: Path, planted_pool: list[list[int]]) -> Sources:
    """A proxy that learns counting well from any few documents that count."""

    def train(chosen: list[int]) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
        settings = TrainingParams(num_epochs=30, batch_tokens=160, learning_rate=5e-3)
        training.train(model, [planted_pool[place] for place in chosen], settings)
        return model

    return Sources(train)
