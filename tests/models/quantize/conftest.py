"""What tests of quantization share."""

import pytest
import torch


@pytest.fixture
def documents() -> list[list[int]]:
    """Four documents of 48 random tokens."""
    return torch.randint(3, 259, (4, 48), generator=torch.Generator().manual_seed(0)).tolist()
