"""Tickets of `early_bird` and `iterative_magnitude`: when they are found, how sparse they are, and their controls."""

import pytest
import torch

from models import adapters, catalog
from models.core.layers.linears import linears
from models.regimes import early_bird, iterative_magnitude
from tests.models.regimes.world import TRAINING, batch, load, train


def test_the_mask_of_the_largest_is_drawn_by_hand_and_no_layer_is_emptied() -> None:
    masks = early_bird.draw([torch.tensor([5.0, -4.0, 3.0]), torch.tensor([0.1, -0.2, 0.05])], pruned_share=0.5)
    assert [mask.tolist() for mask in masks] == [[True, True, True], [False, True, False]]
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


@pytest.mark.parametrize("name", ["early_bird", "layer_skip_gate", "iterative_magnitude"])
def test_what_rewrites_weights_refuses_a_model_that_has_frozen_ones(model, name: str) -> None:
    adapters.attach(model, catalog.parse("adapters", {"name": "qlora"}), torch.Generator().manual_seed(0))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=f'regime "{name}" rewrites the frozen weights of this model, such as model'):
        train(model, [catalog.parse("regimes", {"name": name})])
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def zeros(model) -> dict[str, torch.Tensor]:
    return {name: layer.weight == 0 for name, layer in linears(model)}


def test_the_smallest_of_all_layers_go_by_hand() -> None:
    weights = {"a": torch.tensor([[1.0, -2.0], [9.0, 8.0]]), "b": torch.tensor([[0.5, -7.0]])}
    masks = {"a": torch.tensor([[True, True], [True, False]]), "b": torch.tensor([[True, True]])}
    fewer = iterative_magnitude.smallest(weights, masks, pruned_share=0.4)
    assert fewer["a"].tolist() == [[False, True], [True, False]] and fewer["b"].tolist() == [[False, True]]
    assert masks["a"].tolist() == [[True, True], [True, False]]


def test_an_iterative_ticket_is_as_sparse_as_its_rounds_make_it(model) -> None:
    trained = train(model, [iterative_magnitude.Params(num_rounds=2, pruned_share=0.5)], num_epochs=2)
    gone, count = (sum(int(f(mask)) for mask in zeros(model).values()) for f in (torch.sum, torch.numel))
    assert trained.figures["sparsity"] == pytest.approx(0.75, abs=1e-4)
    assert gone / count == pytest.approx(0.75, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rewind", [0.0, 0.5])
def test_an_iterative_ticket_starts_from_the_weights_of_the_step_it_is_rewound_to(tiny_target, rewind: float) -> None:
    model, seen = load(tiny_target), []
    weight = model.model.layers[0].mlp.up_proj.weight
    model.register_forward_pre_hook(lambda module, args: seen.append(weight.detach().clone()))
    trained = train(model, [iterative_magnitude.Params(num_rounds=1, rewind=rewind)], num_epochs=4)
    num_steps = trained.num_skipped + len(trained.losses)
    step = int(rewind * num_steps)
    assert trained.num_skipped == step and len(seen) == num_steps + num_steps - step == trained.num_steps
    ticket = seen[num_steps]
    kept = ticket != 0
    assert torch.equal(ticket[kept], seen[step][kept]) and 0 < kept.float().mean() < 1


@pytest.mark.slow
def test_an_iterative_tickets_controls_keep_what_they_say(tiny_target) -> None:
    models = {}
    for ticket in ("rewound", "random", "reinitialised"):
        models[ticket] = load(tiny_target)
        train(models[ticket], [iterative_magnitude.Params(num_rounds=1, ticket=ticket)], num_epochs=1)
    found, random, drawn = (zeros(model) for model in models.values())
    for name in found:
        assert torch.equal(found[name], drawn[name]), name
        assert found[name].sum() == random[name].sum() and not torch.equal(found[name], random[name]), name
    name = "model.layers.0.mlp.up_proj.weight"
    rewound, redrawn = (models[ticket].state_dict()[name] for ticket in ("rewound", "reinitialised"))
    kept = ~found[name.removesuffix(".weight")]
    assert torch.corrcoef(torch.stack([rewound[kept], redrawn[kept]]))[0, 1].abs() < 0.1
