from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.core.learning import training
from models.core.learning.second_task import SecondTask
from models.params import TrainingParams
from models.regimes import iterative_magnitude
from tests.models.core.learning.runs import require_equal
from tests.models.regimes.world import load

PARAMS = TrainingParams(learning_rate=1e-3, weight_decay=0.0, warmup=0.0, batch_tokens=64, max_length=32)


def drawn(seed: int, count: int, first: int, last: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(first, last, (8 + number % 3,), generator=rng).tolist() for number in range(count)]


FIRST, SECOND = drawn(0, 8, 3, 67), drawn(1, 12, 100, 140)


def trained(target: Path, params: TrainingParams, weight: float | None) -> tuple[PreTrainedModel, training.Trained]:
    model = load(target)
    more = [] if weight is None else [SecondTask(SECOND, weight, params, 0)]
    return model, training.train_by_name(model, FIRST, params, (), 0, None, None, more)


def nats(model: PreTrainedModel, documents: list[list[int]]) -> torch.Tensor:
    """Return the mean over all tokens of documents that follow another, document by document."""
    each = [torch.tensor([document]) for document in documents]
    told = [model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None]) for ids in each]
    return -torch.cat(told).mean()


def test_a_step_goes_down_the_first_loss_and_the_weighed_second(tiny_target: Path) -> None:
    """One step of one batch each, against AdamW on the sum that is written out here."""
    params = PARAMS.model_copy(update={"batch_tokens": 10_000})
    stepped, _ = trained(tiny_target, params, 0.3)
    model = load(tiny_target)
    rate = training.learning_rate(params, 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    (nats(model, FIRST) + 0.3 * nats(model, SECOND)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), params.max_grad_norm)
    optimizer.step()
    plain, _ = trained(tiny_target, params, None)
    for (name, wanted), got, other in zip(
        model.named_parameters(), stepped.parameters(), plain.parameters(), strict=True
    ):
        # A first step of AdamW moves by the sign of a gradient, and that of a tiny one hangs on rounding.
        assert (wanted - got).abs().gt(1e-5).float().mean() < 0.02, name
        assert (other - got).abs().gt(1e-5).float().mean() > 0.02, name


def test_the_documents_of_a_step_are_the_same_whatever_came_before_and_all_get_their_turn() -> None:
    params = PARAMS.model_copy(update={"batch_tokens": 20})
    one, other = (SecondTask(SECOND, 1.0, params, 3) for _ in range(2))
    steps = training.num_steps(SECOND, params)
    epoch = [one.batch_at(step) for step in range(steps)]
    assert steps == 6
    assert sorted(document for batch in epoch for document in batch) == sorted(SECOND)
    assert other.batch_at(2) == epoch[2]
    assert [one.batch_at(steps + step) for step in range(steps)] != epoch
    assert [SecondTask(SECOND, 1.0, params, 4).batch_at(step) for step in range(steps)] != epoch
    one.restore({"loss": 1.5})
    assert one.state() == {"loss": 1.5}


@pytest.mark.slow
def test_the_second_task_is_learnt_by_its_weight_and_not_at_all_with_0(tiny_target: Path) -> None:
    longer = PARAMS.model_copy(update={"num_epochs": 20})
    found = [trained(tiny_target, longer, weight) for weight in (None, 0.0, 0.5)]
    (plain, _), (without, untold), (learnt, told) = found
    require_equal(plain, without)
    assert (untold.figures, [*told.figures]) == ({}, ["second_task_loss"])
    with torch.inference_mode():
        assert float(nats(learnt, SECOND)) < float(nats(without, SECOND)) - 1


def test_nothing_to_learn_and_a_loop_of_its_own_are_refused(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="none of 1 documents has two tokens"):
        SecondTask([[3]], 1.0, PARAMS, 0)
    loop, more = iterative_magnitude.Params(), [SecondTask(SECOND, 1.0, PARAMS, 0)]
    with pytest.raises(ValueError, match='"iterative_magnitude" is a loop of its own: it takes one process and no'):
        training.train_by_name(load(tiny_target), FIRST, PARAMS, (loop,), 0, None, None, more)
