"""LoRA: a product by hand, what it costs, an exact merge, and settings that don't fit."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM, PreTrainedModel

from models import adapters
from models.adapters import lora
from models.core.layers.lora import add_low_rank, take_out


def test_a_layer_by_hand() -> None:
    model = nn.ModuleDict({"q_proj": nn.Linear(2, 2, bias=False)})
    model.q_proj.weight.data = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    add_low_rank(model, ["q_proj"], rank=1, alpha=3.0, rng=torch.Generator())
    model.q_proj.lora_A["default"].weight.data = torch.tensor([[1.0, -1.0]])
    model.q_proj.lora_B["default"].weight.data = torch.tensor([[2.0], [0.5]])
    # W x = (5, 4); A x = 3; B A x = (6, 1.5), times 3 / 1.
    wanted = [5 + 18, 4 + 4.5]
    assert model.q_proj(torch.tensor([5.0, 2.0])).tolist() == wanted
    take_out(model)
    assert type(model.q_proj) is nn.Linear
    assert model.q_proj(torch.tensor([5.0, 2.0])).tolist() == wanted


def test_the_factors_cost_6BLrE_and_the_matrix_itself_3BLE2() -> None:
    num_sequences, length, width, rank = 2, 6, 32, 4
    inputs = torch.randn(num_sequences, length, width, requires_grad=True)

    def multiplications(layer: nn.Module) -> int:
        with FlopCounterMode(display=False) as counter:
            layer(inputs).sum().backward()
        return counter.get_total_flops() // 2

    model = nn.ModuleDict({"q_proj": nn.Linear(width, width, bias=False)})
    assert multiplications(model.q_proj) == 3 * num_sequences * length * width**2
    add_low_rank(model, ["q_proj"], rank, 1.0, torch.Generator())
    passes_through_base = 2 * num_sequences * length * width**2
    assert multiplications(model.q_proj) == passes_through_base + 6 * num_sequences * length * rank * width


def test_in_double_precision_a_merge_moves_logits_by_rounding_alone(base: PreTrainedModel) -> None:
    adapted = adapters.attach(base.double(), lora.Params(), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in adapted.trained.values():
            parameter += 0.05
        token_ids = torch.arange(3, 43)[None]
        before = base(token_ids).logits
        after = adapters.merge(adapted)(token_ids).logits
    assert float((after - before).abs().max()) < 1e-12 * float(before.abs().max())


def test_the_model_starts_as_its_base(base: PreTrainedModel) -> None:
    token_ids = torch.arange(3, 43)[None]
    before = base(token_ids).logits
    adapters.attach(base, lora.Params(), torch.Generator().manual_seed(0))
    assert torch.equal(base(token_ids).logits, before)


def test_query_and_value_of_the_default_target_are_a_third_of_a_percent(smollm2_shape: LlamaForCausalLM) -> None:
    base = smollm2_shape.num_parameters()
    lora.insert(smollm2_shape, lora.Params(), torch.Generator())
    # Of 30 layers, query [576, 576] and value [192, 576] in rank 8.
    wanted = 30 * 8 * (576 + 576 + 576 + 192)
    assert smollm2_shape.num_parameters(only_trainable=True) == wanted
    assert 0.003 < wanted / base < 0.004


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"layers": ("q_proj", "query")}, "layers must be of down_proj, .*; got query"),
        ({"rank": 65, "layers": ("k_proj",)}, "rank must be at most 64, the smaller side of .*k_proj; got 65"),
    ],
)
def test_settings_that_do_not_fit_are_refused_and_leave_the_model_plain(
    base: PreTrainedModel, settings: dict[str, object], fault: str
) -> None:
    with pytest.raises(ValueError, match=fault):
        adapters.attach(base, lora.Params(**settings), torch.Generator())
    adapters.attach(base, lora.Params(), torch.Generator())
