"""AWQ: scaling changes nothing by itself, protects what carries much, and refuses layouts that it does not know."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from models.quantize import awq, rtn


@pytest.fixture
def lively(model: PreTrainedModel) -> PreTrainedModel:
    """A model in which a few features carry most."""
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[:6] = block.post_attention_layernorm.weight[:6] = 25.0
    return model


def logits(model: PreTrainedModel, documents: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor(documents)).logits


def test_scales_are_folded_so_that_only_rounding_is_left(
    lively: PreTrainedModel, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = logits(lively, documents)
    norm = lively.model.layers[0].input_layernorm.weight.clone()
    quantized = awq.quantize(lively, documents, awq.Params(bits=8, group_size=32, clip=False))
    assert not torch.allclose(lively.model.layers[0].input_layernorm.weight, norm, rtol=0.05)
    after = logits(quantized.model, documents)
    assert (after - before).norm() < 0.08 * before.norm()


def test_features_that_carry_much_lose_less_than_to_rounding_to_nearest(
    lively: PreTrainedModel, documents: list[list[int]]
) -> None:
    before = logits(lively, documents)
    nearest = rtn.quantize(copy.deepcopy(lively), [], rtn.Params(group_size=128, symmetric=False))
    aware = awq.quantize(lively, documents, awq.Params(group_size=128))
    lost = [(logits(found.model, documents) - before).norm() for found in (aware, nearest)]
    assert lost[0] < 0.85 * lost[1]


def test_a_layer_of_another_layout_is_named(model: PreTrainedModel, documents: list[list[int]]) -> None:
    model.model.layers[0].mlp.side_proj = torch.nn.Linear(128, 128)
    with pytest.raises(ValueError, match=r"layer model\.layers\.0\.mlp\.side_proj is not of Llama's layout"):
        awq.quantize(model, documents, awq.Params())
