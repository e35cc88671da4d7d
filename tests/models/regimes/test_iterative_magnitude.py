"""Tickets have the sparsity asked for, start where they should, and their controls differ in one thing each."""

import pytest
import torch

from models import adapters
from models.adapters import lora
from models.core.checkpoints.invariants import PreservedStructure, noted
from models.core.layers.linears import linears
from models.regimes import iterative_magnitude
from tests.models.regimes.world import load, train


def zeros(model) -> dict[str, torch.Tensor]:
    return {name: layer.weight == 0 for name, layer in linears(model)}


def test_the_smallest_of_all_layers_go_by_hand() -> None:
    weights = {"a": torch.tensor([[1.0, -2.0], [9.0, 8.0]]), "b": torch.tensor([[0.5, -7.0]])}
    masks = {"a": torch.tensor([[True, True], [True, False]]), "b": torch.tensor([[True, True]])}
    fewer = iterative_magnitude.smallest(weights, masks, pruned_share=0.4)
    assert fewer["a"].tolist() == [[False, True], [True, False]] and fewer["b"].tolist() == [[False, True]]
    assert masks["a"].tolist() == [[True, True], [True, False]]


def test_the_ticket_is_as_sparse_as_its_rounds_make_it(model) -> None:
    trained = train(model, [iterative_magnitude.Params(num_rounds=2, pruned_share=0.5)], num_epochs=2)
    gone, count = (sum(int(f(mask)) for mask in zeros(model).values()) for f in (torch.sum, torch.numel))
    assert trained.figures["sparsity"] == pytest.approx(0.75, abs=1e-4)
    assert gone / count == pytest.approx(0.75, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("rewind", [0.0, 0.5])
def test_a_ticket_starts_from_the_weights_of_the_step_it_is_rewound_to(tiny_target, rewind: float) -> None:
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
def test_controls_keep_what_they_say(tiny_target) -> None:
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


def test_the_tickets_zeroes_are_promised_and_stay_when_all_layers_are_finetuned(model) -> None:
    train(model, [iterative_magnitude.Params(num_rounds=1, pruned_share=0.5)], num_epochs=1)
    assert noted(model.config).patterns.keys() == zeros(model).keys()
    before, held = zeros(model), PreservedStructure(model)
    adapted = adapters.attach(model, lora.CORNERS[0], torch.Generator().manual_seed(0))
    train(model, [], num_epochs=1)
    held.put_back(adapters.merge(adapted))
    assert all(torch.equal(zero, zeros(model)[name]) for name, zero in before.items())
