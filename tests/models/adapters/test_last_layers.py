"""The last blocks: they and nothing else, and nothing kept for the others."""

import pytest
import torch
from transformers import PreTrainedModel

from models import adapters
from models.adapters import last_layers
from models.core.learning.counting import held_bytes

TOKEN_IDS = torch.arange(3, 43)[None]


def test_only_the_last_blocks_are_trained(base: PreTrainedModel) -> None:
    adapted = adapters.attach(base, last_layers.Params(num_layers=1), torch.Generator())
    block = sum(parameter.numel() for parameter in base.model.layers[1].parameters())
    assert all(name.startswith("model.layers.1.") for name in adapted.trained)
    assert adapted.trained_share == block / base.num_parameters()


def test_blocks_before_the_first_trained_one_keep_nothing(base: PreTrainedModel) -> None:
    def held(num_layers: int) -> int:
        base.requires_grad_(False)
        last_layers.insert(base, last_layers.Params(num_layers=num_layers), torch.Generator())
        return held_bytes(base, lambda: base(TOKEN_IDS, labels=TOKEN_IDS, use_cache=False).loss)

    both, last = held(2), held(1)
    base.requires_grad_(False)
    head_alone = held_bytes(base, lambda: base(TOKEN_IDS, labels=TOKEN_IDS, use_cache=False).loss)
    assert head_alone == 0
    assert last < 0.7 * both


def test_more_blocks_than_the_model_has_are_refused(base: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="num_layers must be at most 2, the model's; got 3"):
        adapters.attach(base, last_layers.Params(num_layers=3), torch.Generator())
