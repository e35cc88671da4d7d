"""rtn: scales as they are stored, sizes by hand, bits that no engine has a kernel for."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models import quantize
from models.quantize import rtn


def test_a_weight_takes_half_a_byte_and_its_share_of_a_scale(model: PreTrainedModel) -> None:
    tensors = rtn.quantize(model, [], rtn.Params(group_size=32)).tensors
    prefix = "model.layers.0.mlp.up_proj."  # 256 × 128
    assert tensors[prefix + "weight_packed"].nbytes == 256 * 128 / 2
    assert tensors[prefix + "weight_scale"].shape == (256, 4)
    assert tensors[prefix + "weight_scale"].dtype == torch.bfloat16
    assert tensors[prefix + "weight_shape"].tolist() == [256, 128]


def test_more_bits_and_smaller_groups_lose_less(model: PreTrainedModel) -> None:
    weight = model.model.layers[0].mlp.up_proj.weight.detach()

    def error(**settings: int) -> float:
        quantized = rtn.quantize(copy.deepcopy(model), [], rtn.Params(**settings))
        return float((quantized.model.model.layers[0].mlp.up_proj.weight - weight).norm())

    assert error(bits=8) < error(bits=4) / 10
    assert error(group_size=32) < error(group_size=128)


def test_bits_that_no_engine_multiplies_are_simulated_and_not_saved(model: PreTrainedModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no engine reads this quantized form"):
        quantize.save(rtn.quantize(model, [], rtn.Params(bits=3)), tmp_path)
