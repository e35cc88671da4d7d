"""kv_cache: rounding by hand, in place of what is attended to, and the bytes of a token."""

import pytest
import torch
from transformers import PreTrainedModel

from models.quantize import kv_cache
from models.quantize.kv_cache import Params


def test_each_token_of_a_head_is_rounded_by_its_own_scale() -> None:
    states = torch.tensor([[[[127.0, 0.4], [1.27, 0.994]]]])
    expected = torch.tensor([[[[127.0, 0.0], [1.27, 0.99]]]])
    assert torch.allclose(kv_cache._int8(states), expected, atol=1e-6)


def test_fp8_clips_at_its_largest_number() -> None:
    assert kv_cache._fp8(torch.tensor([1000.0, 17.0])).tolist() == [448.0, 16.0]


@pytest.mark.parametrize(("form", "width"), [("int8", 2 * (64 + 4)), ("fp8", 2 * 64)])
def test_a_token_takes_its_bytes_in_every_layer(model: PreTrainedModel, form: str, width: int) -> None:
    quantized = kv_cache.quantize(model, [], Params(form=form))
    assert quantized.figures["kv_bytes_per_token"] == 2 * width  # 2 layers, 1 head of 64


def test_attention_stays_causal_and_reads_rounded_values(model: PreTrainedModel) -> None:
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        exact = model(ids).logits
        quantized = kv_cache.quantize(model, [], Params(form="fp8"))
        rounded = quantized.model(ids).logits
        assert not torch.equal(rounded, exact) and (rounded - exact).norm() < 0.2 * exact.norm()
        assert torch.allclose(quantized.model(ids[:, :9]).logits, rounded[:, :9], atol=1e-4)
