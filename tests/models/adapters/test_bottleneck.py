"""Bottleneck adapters: one by hand, how near the base they start, how many parameters they are."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel

from models import adapters
from models.adapters import bottleneck

TOKEN_IDS = torch.arange(3, 43)[None]


def test_a_module_by_hand() -> None:
    base = nn.Linear(2, 2, bias=False)
    base.weight.data = torch.eye(2)
    module = bottleneck.Bottleneck(base, 1, torch.Generator())
    module.down.weight.data, module.down.bias.data = torch.tensor([[1.0, 1.0]]), torch.tensor([-3.0])
    module.up.weight.data, module.up.bias.data = torch.tensor([[2.0], [-1.0]]), torch.tensor([0.0, 0.25])
    # D h + d = 1 + 3 − 3 = 1, and gelu(1) = Φ(1) = 0.8413.
    assert module(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([1 + 2 * 0.8413, 3 - 0.8413 + 0.25], abs=1e-4)


def test_the_model_starts_near_its_base_and_its_weights_are_cut_at_two_deviations(base: PreTrainedModel) -> None:
    before = base(TOKEN_IDS).logits.detach()
    adapters.attach(base, bottleneck.Params(), torch.Generator().manual_seed(0))
    assert 0 < float((base(TOKEN_IDS).logits.detach() - before).norm() / before.norm()) < 0.01
    drawn = torch.cat(
        [m.down.weight.detach().flatten() for m in base.modules() if isinstance(m, bottleneck.Bottleneck)]
    )
    assert float(drawn.abs().max()) <= 0.02
    assert float(drawn.std()) == pytest.approx(0.0088, rel=0.05)  # a Gaussian cut at two deviations has 0.88 of its own


@pytest.mark.parametrize("width", [8, 32])
def test_parameters_are_two_modules_and_two_norms_a_block(smollm2_shape: LlamaForCausalLM, width: int) -> None:
    base = smollm2_shape.num_parameters()
    bottleneck.insert(smollm2_shape, bottleneck.Params(width=width), torch.Generator())
    trained = smollm2_shape.num_parameters(only_trainable=True)
    assert trained == 30 * (2 * (2 * width * 576 + width + 576) + 2 * 576)
    assert 0.004 < trained / base < 0.02


def test_a_middle_as_wide_as_the_model_is_refused(base: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="width must be less than the model's 128; got 128"):
        adapters.attach(base, bottleneck.Params(width=128), torch.Generator())


def test_a_block_of_other_names_is_refused(base: PreTrainedModel) -> None:
    base.model.layers[1].mlp.down_proj = nn.Identity()
    with pytest.raises(ValueError, match=r"model.layers.1 has no linear layer mlp.down_proj"):
        bottleneck.insert(base, bottleneck.Params(), torch.Generator())
