"""Blocks are dropped more the deeper they are, and exits are trained."""

import pytest
import torch

from models.evaluation.perplexity import perplexity, score
from models.regimes import Plan, layer_dropout
from tests.models.regimes.world import documents, load, train


def test_probabilities_and_weights_are_those_worked_out_by_hand() -> None:
    assert layer_dropout.probabilities(3, 0.1).tolist() == pytest.approx([0, 0.1 * (2**0.5 - 1), 0.1])
    # e = 0.2·0, 0.2·(0 + 1), 2 + 0.2·(0 + 1), over the last
    assert layer_dropout.exit_weights(3, 0.2).tolist() == pytest.approx([0, 0.2 / 2.2, 1])


def test_without_dropping_and_exits_it_is_plain_training(tiny_target) -> None:
    plain, model = load(tiny_target), load(tiny_target)
    train(plain, [])
    trained = train(model, [layer_dropout.Params(max_probability=0, exit_scale=0)])
    assert trained.figures == {"skipped_layer_share": 0}
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name]), name


def test_an_early_exit_says_more_after_it_was_trained(tiny_target) -> None:
    def exit_perplexity(methods) -> float:
        model = load(tiny_target, num_layers=3)
        train(model, methods, num_epochs=2)
        model.config.num_hidden_layers = 2  # the forward pass ends after so many
        return perplexity(score(model, documents()))

    settings = layer_dropout.Params(exit_scale=1, rotation=1)
    assert exit_perplexity([settings]) < 0.8 * exit_perplexity([])


def test_a_model_without_an_early_layer_is_refused(tiny_target) -> None:
    regime = layer_dropout.regime(layer_dropout.Params(), torch.Generator())
    with pytest.raises(ValueError, match="at least 2 blocks; got 1"):
        regime.start(load(tiny_target, num_layers=1), Plan(1, 1))
