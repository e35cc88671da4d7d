"""An early-bird ticket is found when masks stop changing, and is what is left in the end."""

import pytest
import torch

from models import adapters, catalog
from models.adapters import lora
from models.core.checkpoints.invariants import PreservedStructure, noted
from models.core.layers.linears import linears
from models.regimes import early_bird
from tests.models.regimes.world import TRAINING, batch, load, train


def test_the_mask_of_the_largest_is_drawn_by_hand_and_no_layer_is_emptied() -> None:
    masks = early_bird.draw([torch.tensor([5.0, -4.0, 3.0]), torch.tensor([0.1, -0.2, 0.05])], pruned_share=0.5)
    assert [mask.tolist() for mask in masks] == [[True, True, True], [False, True, False]]


def test_the_distance_of_masks_is_the_share_of_places_that_differ() -> None:
    assert early_bird.distance("11001", "10011") == pytest.approx(2 / 5)


def test_coefficients_are_multiplied_into_the_weights(model) -> None:
    regime = early_bird.Hooks(early_bird.Params(), torch.Generator())
    with torch.no_grad():
        for number, coefficient in enumerate(regime.start(model, 1)):
            coefficient.copy_(torch.rand(coefficient.shape, generator=torch.Generator().manual_seed(number)))
            coefficient[0] = 0
        scaled = model(**batch()).logits
        regime.finish(model)
        assert torch.allclose(model(**batch()).logits, scaled, rtol=1e-4, atol=1e-4)
    assert not model.model.layers[0].mlp.gate_proj.weight[0].any()


def test_training_stops_at_the_epoch_whose_mask_agrees_with_the_window(model, tiny_target) -> None:
    whole = train(load(tiny_target), [])
    trained = train(model, [early_bird.Params(epsilon=0.99, window=2, then="stop")])
    assert trained.figures["ticket_epoch"] == 2  # epochs 0 and 1 fill the window
    assert trained.num_steps == whole.num_steps * 3 // TRAINING.num_epochs


def test_the_ticket_alone_is_trained_on_and_its_flops_are_told(model) -> None:
    trained = train(model, [early_bird.Params(epsilon=0.99, window=2, pruned_share=0.5)])
    # Of 512 channels half, and one of the four heads spared at most.
    dead = sum(int((~layer.mlp.down_proj.weight.any(0)).sum()) for layer in model.model.layers)
    assert dead == 256
    layers = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)
    heads = sum(int((~layer.self_attn.o_proj.weight.any(0)).sum()) // 64 for layer in model.model.layers)
    share = 1 - (256 * 3 * 128 + heads * 2 * 64 * 128) / (layers + 259 * 128)
    later = (TRAINING.num_epochs - 3) / TRAINING.num_epochs
    assert trained.figures["flops_share"] == pytest.approx(1 - later * (1 - share))


def test_the_control_keeps_as_many_parts_of_each_layer_from_the_same_epoch_on_and_others(tiny_target) -> None:
    found, kept = [], []
    for ticket in ("largest", "random"):
        model = load(tiny_target)
        params = early_bird.Params(epsilon=0.99, window=2, pruned_share=0.5, ticket=ticket)
        found.append(train(model, [params]).figures)
        kept.append([layer.mlp.down_proj.weight.any(0) for layer in model.model.layers])
    assert found[0] == pytest.approx(found[1])
    assert [int(layer.sum()) for layer in kept[0]] == [int(layer.sum()) for layer in kept[1]]
    assert any(not torch.equal(one, other) for one, other in zip(*kept, strict=True))


def test_without_agreement_nothing_is_dropped(model) -> None:
    trained = train(model, [early_bird.Params(epsilon=1e-9, window=3)])
    assert trained.figures == {"flops_share": 1.0}
    assert model.model.layers[0].mlp.down_proj.weight.any(0).all()


def test_the_tickets_zeroes_are_promised_and_a_low_rank_part_that_is_merged_leaves_them(model) -> None:
    train(model, [early_bird.Params(window=1, epsilon=0.99)])
    assert {name.rpartition(".")[2] for name in noted(model.config).patterns} == {
        "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    zero, held = {name: layer.weight == 0 for name, layer in linears(model)}, PreservedStructure(model)
    adapted = adapters.attach(model, lora.CORNERS[0], torch.Generator().manual_seed(0))
    train(model, [])
    held.put_back(adapters.merge(adapted))
    assert all((layer.weight[zero[name]] == 0).all() for name, layer in linears(model))


@pytest.mark.parametrize("name", ["early_bird", "layer_skip_gate", "iterative_magnitude"])
def test_what_rewrites_weights_refuses_a_model_that_has_frozen_ones(model, name: str) -> None:
    adapters.attach(model, catalog.parse("adapters", {"name": "qlora"}), torch.Generator().manual_seed(0))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f'regime "{name}" rewrites the frozen weights of this model, such as model'):
        train(model, [catalog.parse("regimes", {"name": name})])
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
