"""Blocks are dropped more the deeper they are, and exits are trained."""

import pytest

from models.core.evaluation.perplexity import perplexity, score
from models.regimes import layer_dropout
from tests.models.regimes.world import documents, load, train


def test_probabilities_and_weights_are_those_worked_out_by_hand() -> None:
    assert layer_dropout.probabilities(3, 0.1).tolist() == pytest.approx([0, 0.1 * (2**0.5 - 1), 0.1])
    # e = 0.2·0, 0.2·(0 + 1), 2 + 0.2·(0 + 1), over the last
    assert layer_dropout.exit_weights(3, 0.2).tolist() == pytest.approx([0, 0.2 / 2.2, 1])


def test_an_early_exit_says_more_after_it_was_trained(tiny_target) -> None:
    def exit_perplexity(methods) -> float:
        model = load(tiny_target, num_layers=3)
        train(model, methods, num_epochs=2)
        model.config.num_hidden_layers = 2  # the forward pass ends after so many
        return perplexity(score(model, documents()))

    settings = layer_dropout.Params(exit_scale=1, rotation=1)
    assert exit_perplexity([settings]) < 0.8 * exit_perplexity([])
