"""Mini-batch dropping leaves out its share of the steps, the same ones for a seed."""

import pytest
import torch
from transformers import PreTrainedModel

from models.regimes import minibatch_drop
from tests.models.regimes.world import load, train


def kept(probability: float, num_steps: int, seed: int = 0) -> list[bool]:
    params = minibatch_drop.Params(probability=probability)
    regime = minibatch_drop.Hooks(params, torch.Generator().manual_seed(seed))
    regime.start(torch.nn.Module(), num_steps)
    return [regime.runs(step) for step in range(num_steps)]


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.8])
def test_the_share_that_runs_is_that_which_was_asked_for(probability: float) -> None:
    # 5 standard errors of a coin tossed 10,000 times: a right one fails under another seed once in 1.7 million.
    error = (probability * (1 - probability) / 10_000) ** 0.5
    assert sum(kept(probability, 10_000)) / 10_000 == pytest.approx(1 - probability, abs=5 * error)


def test_another_seed_leaves_out_other_steps() -> None:
    assert kept(0.5, 64, seed=1) == kept(0.5, 64, seed=1) != kept(0.5, 64, seed=2)


def test_steps_that_are_left_out_are_counted_and_learn_nothing(tiny_target) -> None:
    model: PreTrainedModel = load(tiny_target)
    whole = train(load(tiny_target), [])
    trained = train(model, [minibatch_drop.Params()])
    assert trained.num_steps + trained.num_skipped == whole.num_steps
    assert trained.num_tokens < whole.num_tokens
    assert [step for step, _ in trained.losses] != list(range(trained.num_steps))


def test_a_run_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(ValueError, match="probability 0.999999 leaves out all 3 steps"):
        kept(0.999999, 3)
