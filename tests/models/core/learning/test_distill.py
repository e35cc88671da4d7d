"""The distillation loop: it learns, resumes exactly, and stops on a NaN."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from models.core.evaluation import scoring
from models.core.learning import distill
from models.core.learning.hidden import HiddenStates, Sample, length_buckets
from models.drafts import Procedure, eagle3
from models.losses import cross_entropy, forward_kl
from models.precision import fast_dtype
from tests.models.drafts.answered import answers_of, prompts, tau_of

pytestmark = pytest.mark.slow

K = 3


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    return answers_of(tiny_target, prompts(24))


def new_head(target: Path, samples: list[Sample]) -> eagle3.Eagle3:
    counts = np.bincount(np.concatenate([s.token_ids for s in samples]), minlength=259)
    return eagle3.create(eagle3.Params(vocab_size=128), target, counts)


def params(**changes: object) -> distill.Params:
    return distill.Params(**{"num_epochs": 6, "batch_tokens": 256, "learning_rate": 1e-3, "num_threads": 1, **changes})


def test_training_raises_acceptance(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    head = new_head(tiny_target, samples)
    (tmp_path / "before").mkdir()
    eagle3.save(head, tmp_path / "before")
    report = distill.train(head, tiny_target, samples, params(num_epochs=30), K, tmp_path)
    (tmp_path / "after").mkdir()
    eagle3.save(head, tmp_path / "after")
    before, after = (eagle3.load(tmp_path / name, tiny_target) for name in ("before", "after"))
    scores = scoring.score(after, tiny_target, samples, K, tmp_path)
    assert [s.id for s in scores] == [s.id for s in samples]
    taus = [tau_of(head, tiny_target, samples, K, tmp_path) for head in (before, after)]
    assert taus[1] > taus[0] + 0.15, taus
    assert report.num_tokens == 30 * sum(len(s.token_ids) for s in samples)


class _Stop(Exception):
    pass


def test_a_small_window_is_passed_over_until_there_were_enough_steps(
    tiny_target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    shown: list[distill.Progress] = []
    head, num_batches = new_head(tiny_target, samples), len(length_buckets(samples, 256))
    settings = params(num_epochs=1, min_steps=2 * num_batches + 1)
    report = distill.train(head, tiny_target, samples, settings, K, tmp_path, on_progress=shown.append)
    assert report.num_steps == 2 * num_batches + 1
    assert shown[-1].total == sum(len(s.token_ids) for s in samples) * report.num_steps // num_batches
    enough = params(num_epochs=2, min_steps=num_batches)
    report = distill.train(new_head(tiny_target, samples), tiny_target, samples, enough, K, tmp_path)
    assert report.num_steps == 2 * num_batches


def test_a_nan_stops_the_run(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    head = new_head(tiny_target, samples)
    with torch.no_grad():
        head.midlayer["mlp"]["up_proj"].weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        distill.train(head, tiny_target, samples, params(), K, tmp_path)


def test_answers_too_short_to_draft_are_refused(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sample has an answer of more than two tokens"):
        distill.train(new_head(tiny_target, samples), tiny_target, [Sample("a", "d", [5], [6])], params(), K, tmp_path)


def test_hidden_states_are_the_residual_streams_also_after_an_interruption(
    tiny_target: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.core.learning.hidden.BATCH_TOKENS", 64)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    HiddenStates(tmp_path, samples[:10], (1, 2), 128).extract(tiny_target)
    with (tmp_path / "index.jsonl").open("a") as index:
        index.write('{"id": "half-writ')
    with (tmp_path / "states.bin").open("ab") as states:
        states.write(b"x" * 1000)
    again = HiddenStates(tmp_path, samples, (1, 2), 128)
    again.extract(tiny_target)
    # States are kept in bfloat16; a processor that computes in it too rounds in every layer.
    close = (1e-2, 3e-2, 1e-4) if fast_dtype() == torch.float32 else (5e-2, 1e-1, 1e-2)
    for sample in samples:
        got, log_sums = again.read(sample)
        with torch.inference_mode():
            output = model(torch.tensor([sample.token_ids]), output_hidden_states=True)
        normed = model.model.norm(got[:, 128:].float())
        first = len(sample.prompt_ids) - 1
        sums = output.logits[0, first:].logsumexp(-1)
        torch.testing.assert_close(got[:, :128].float(), output.hidden_states[1][0], rtol=1e-2, atol=close[0])
        torch.testing.assert_close(normed, output.hidden_states[2][0], rtol=3e-2, atol=close[1])
        torch.testing.assert_close(log_sums[first:], sums, rtol=1e-4, atol=close[2])


def test_a_walk_counts_accepted_tokens_step_by_step_by_hand() -> None:
    # Of an answer 10, 11, … 15 token 10 comes from the prefill. 2 right: emits 11, 12, 13; then none: emits 14; then 3
    # right but one token is left.
    assert scoring._walk(6, [2, 0, 3, 0, 3]) == [2, 0, 1]


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_a_draft_is_unrolled_as_far_as_it_is_served(
    tiny_target: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_draft_tokens: int
) -> None:
    head, asked = new_head(tiny_target, samples), []
    unroll = head.unroll
    monkeypatch.setattr(
        head, "unroll", lambda rows, num_steps, keep: asked.append(num_steps) or unroll(rows, num_steps, keep)
    )
    distill.train(head, tiny_target, samples, params(num_epochs=1), num_draft_tokens, tmp_path)
    assert set(asked) == {num_draft_tokens}
    with pytest.raises(ValueError, match="num_draft_tokens from 1; got 0"):
        distill.train(head, tiny_target, samples, params(), 0, tmp_path)


def test_a_family_is_trained_as_it_says_unless_the_recipe_says_otherwise() -> None:
    own = Procedure(loss=cross_entropy.Params(), follow="all", step_decay=0.5)
    assert distill.Params().over(own) == own
    said = distill.Params(step_decay=0.9, follow="accepted")
    assert said.over(own) == (cross_entropy.Params(), "accepted", 0.9)
    assert distill.Params(loss={"name": "forward_kl"}).over(own).loss == forward_kl.Params()


def run(head: eagle3.Eagle3, target: Path, samples: list[Sample], work: Path, **changes: object) -> distill.Report:
    files = {name: changes.pop(name, None) for name in ("state", "state_out")}
    return distill.train(head, target, samples, params(**changes), K, work, **files)


def test_runs_that_go_on_from_each_other_are_one_long_run(
    tiny_target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    """One batch an epoch, so that the order of batches is the same; the moments make the difference."""
    settings = {"schedule": "constant", "warmup": 0.0, "batch_tokens": 10_000}
    whole = new_head(tiny_target, samples)
    run(whole, tiny_target, samples, tmp_path / "whole", num_epochs=6, **settings)
    state, last, losses = None, None, []
    for window in range(3):
        head = new_head(tiny_target, samples)
        if last is not None:
            head.load_state_dict(last)
        end = tmp_path / f"end{window}.safetensors"
        work = tmp_path / f"window{window}"
        report = run(head, tiny_target, samples, work, num_epochs=2, state=state, state_out=end, **settings)
        losses += [loss for _, loss in report.losses]
        state, last = end, {name: tensor.bfloat16().float() for name, tensor in head.state_dict().items()}
    assert all(torch.equal(tensor, head.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert losses[-1] < losses[2] < losses[0]


def test_without_its_moments_a_run_is_another_one(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    settings = {"schedule": "constant", "warmup": 0.0, "num_epochs": 2}
    first, end = new_head(tiny_target, samples), tmp_path / "end.safetensors"
    run(first, tiny_target, samples, tmp_path / "a", state_out=end, **settings)
    fresh, going_on = new_head(tiny_target, samples), new_head(tiny_target, samples)
    fresh.load_state_dict(first.state_dict())
    run(fresh, tiny_target, samples, tmp_path / "b", **settings)
    run(going_on, tiny_target, samples, tmp_path / "c", state=end, **settings)
    assert not torch.equal(fresh.fc.weight, going_on.fc.weight)


@pytest.mark.parametrize("more", [{}, {"schedule": "constant", "average": 0.8}], ids=["alone", "mean and state"])
def test_a_killed_run_resumes_to_the_same_weights_bit_by_bit(
    tiny_target: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    settings, end = {**more, "checkpoint_s": 0.0}, None
    if more:
        end = tmp_path / "end.safetensors"
        run(new_head(tiny_target, samples), tiny_target, samples, tmp_path / "before", state_out=end)
    whole = new_head(tiny_target, samples)
    run(whole, tiny_target, samples, tmp_path / "whole", state=end, state_out=tmp_path / "a", **settings)
    work, advance, steps = tmp_path / "cut", distill._Loop.advance, iter(range(12))

    def killed(self: distill._Loop, batch: list[Sample]) -> float:  # in the middle of a step, after the last checkpoint
        if next(steps, None) is None:
            raise _Stop
        return advance(self, batch)

    with monkeypatch.context() as machine, pytest.raises(_Stop):
        machine.setattr(distill._Loop, "advance", killed)
        run(new_head(tiny_target, samples), tiny_target, samples, work, state=end, **settings)
    resumed = new_head(tiny_target, samples)
    report = run(resumed, tiny_target, samples, work, state=end, state_out=tmp_path / "b", **settings)
    assert report.num_steps == params().num_epochs * len(length_buckets(samples, 256))
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_mean_is_of_the_last_steps(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    """Of two steps, both in the mean: half way between what the first and the second alone end at."""
    settings = {"schedule": "constant", "warmup": 0.0, "batch_tokens": 10_000}
    ends = []
    for number in (1, 2):
        head = new_head(tiny_target, samples)
        run(head, tiny_target, samples, tmp_path / str(number), num_epochs=number, **settings)
        ends.append(head.fc.weight.detach())
    mean = new_head(tiny_target, samples)
    run(mean, tiny_target, samples, tmp_path / "mean", num_epochs=2, average=0.6, **settings)
    torch.testing.assert_close(mean.fc.weight.detach(), (ends[0] + ends[1]) / 2)


def test_a_state_of_another_shape_is_refused(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    end = tmp_path / "end.safetensors"
    save_file({"weight/fc.weight": torch.zeros(2, 2)}, end)
    with pytest.raises(ValueError, match=r"parameter fc.weight has shape \(2, 2\), the draft has \("):
        run(new_head(tiny_target, samples), tiny_target, samples, tmp_path, state=end)
