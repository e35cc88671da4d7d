from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from models.core.layers.kernels import fast_dtype
from models.core.learning import distill
from models.core.learning.hidden import HiddenStates, Sample, length_buckets
from models.drafts import Procedure, eagle3
from models.losses import cross_entropy, forward_kl
from tests.models.core.learning.runs import killed_at, require_equal, short
from tests.models.drafts.answered import answers_of, prompts, tau_of

pytestmark = pytest.mark.slow

K = 3
ONE_BATCH = {"schedule": "constant", "warmup": 0.0, "batch_tokens": 10_000}  # an epoch
Train = Callable[..., tuple[eagle3.Eagle3, distill.Report]]


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    return answers_of(tiny_target, prompts(24))


@pytest.fixture
def head(tiny_target: Path, samples: list[Sample]) -> eagle3.Eagle3:
    counts = np.bincount(np.concatenate([s.token_ids for s in samples]), minlength=259)
    return eagle3.create(eagle3.Params(vocab_size=128), tiny_target, counts)


@pytest.fixture
def train(tiny_target: Path, samples: list[Sample], tmp_path: Path, head: eagle3.Eagle3) -> Train:
    """Train a head, of new weights or those that are given, in a folder, and return it with its report."""

    def run(folder: str, weights: dict[str, torch.Tensor] | None = None, **changes: object):
        files = {name: changes.pop(name, None) for name in ("state", "state_out", "on_progress")}
        made = deepcopy(head)
        made.load_state_dict(weights or head.state_dict())
        params = short(**{"num_epochs": 6, "learning_rate": 1e-3, **changes})
        return made, distill.train(made, tiny_target, samples, params, K, tmp_path / folder, **files)

    return run


def test_training_raises_acceptance(
    tiny_target: Path, samples: list[Sample], tmp_path: Path, head: eagle3.Eagle3, train: Train
) -> None:
    before = tau_of(head, tiny_target, samples, K, tmp_path)
    made, report = train("work", num_epochs=12, learning_rate=3e-3)
    eagle3.save(made, tmp_path)
    after = tau_of(eagle3.load(tmp_path, tiny_target), tiny_target, samples, K, tmp_path)
    assert after > before + 0.15, (before, after)
    assert report.num_tokens == 12 * sum(len(s.token_ids) for s in samples)


def test_a_small_window_is_passed_over_until_there_were_enough_steps(samples: list[Sample], train: Train) -> None:
    shown: list[distill.Progress] = []
    num_batches = len(length_buckets(samples, 256))
    _, report = train("few", num_epochs=1, min_steps=2 * num_batches + 1, on_progress=shown.append)
    assert report.num_steps == 2 * num_batches + 1
    assert shown[-1].total == sum(len(s.token_ids) for s in samples) * report.num_steps // num_batches
    assert train("enough", num_epochs=2, min_steps=num_batches)[1].num_steps == 2 * num_batches


def test_answers_too_short_to_draft_are_refused(tiny_target: Path, head: eagle3.Eagle3, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no sample has an answer of more than two tokens"):
        distill.train(head, tiny_target, [Sample("a", "d", [5], [6])], short(), K, tmp_path)


def test_hidden_states_are_the_residual_streams_also_after_an_interruption(
    tiny_target: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.core.learning.hidden.BATCH_TOKENS", 64)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    HiddenStates(tmp_path, samples[:10], (1, 2), 128).extract(tiny_target)
    with (tmp_path / "index.jsonl").open("a") as index, (tmp_path / "states.bin").open("ab") as states:
        index.write('{"id": "half-writ')
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


def test_a_draft_is_unrolled_as_far_as_it_is_served(
    tiny_target: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: eagle3.Eagle3
) -> None:
    asked, unroll = [], head.unroll
    monkeypatch.setattr(head, "unroll", lambda rows, steps, keep: asked.append(steps) or unroll(rows, steps, keep))
    distill.train(head, tiny_target, samples, short(num_epochs=1), 4, tmp_path)
    assert set(asked) == {4}
    with pytest.raises(ValueError, match="num_draft_tokens from 1; got 0"):
        distill.train(head, tiny_target, samples, short(), 0, tmp_path)


def test_a_family_is_trained_as_it_says_unless_the_recipe_says_otherwise() -> None:
    own = Procedure(loss=cross_entropy.Params(), follow="all", step_decay=0.5)
    assert distill.Params().over(own) == own
    said = distill.Params(step_decay=0.9, follow="accepted")
    assert said.over(own) == (cross_entropy.Params(), "accepted", 0.9)
    assert distill.Params(loss={"name": "forward_kl"}).over(own).loss == forward_kl.Params()


def test_runs_that_go_on_from_each_other_are_one_long_run(train: Train, tmp_path: Path) -> None:
    """The order of batches is the same; the moments make the difference."""
    whole, _ = train("whole", num_epochs=6, **ONE_BATCH)
    weights, state, losses = None, None, []
    for window in range(3):
        end = tmp_path / f"{window}.safetensors"
        made, report = train(f"window{window}", weights, num_epochs=2, state=state, state_out=end, **ONE_BATCH)
        losses += [loss for _, loss in report.losses]
        state, weights = end, {name: tensor.bfloat16().float() for name, tensor in made.state_dict().items()}
    require_equal(whole, made)
    assert losses[-1] < losses[2] < losses[0]


@pytest.mark.parametrize("more", [{}, {"schedule": "constant", "average": 0.8}], ids=["alone", "mean and state"])
def test_a_killed_run_resumes_to_the_same_weights_bit_by_bit(
    train: Train, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]
) -> None:
    settings = {**more, "checkpoint_s": 0.0}
    if more:
        train("before", state_out=(end := tmp_path / "end.safetensors"))
        settings["state"] = end
    whole, _ = train("whole", state_out=tmp_path / "a", **settings)
    with killed_at(12, monkeypatch):  # in the middle of a step, after the last checkpoint
        train("cut", **settings)
    resumed, report = train("cut", state_out=tmp_path / "b", **settings)
    assert report.num_steps == 6 * len(length_buckets(samples, 256))
    require_equal(whole, resumed)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_mean_is_of_the_last_steps(train: Train) -> None:
    """Of two steps, both in the mean: half way between what the first and the second alone end at."""
    ends = [train(f"{number}", num_epochs=number, **ONE_BATCH)[0].fc.weight.detach() for number in (1, 2)]
    mean, _ = train("mean", num_epochs=2, average=0.6, **ONE_BATCH)
    torch.testing.assert_close(mean.fc.weight.detach(), (ends[0] + ends[1]) / 2)


def test_a_state_of_another_shape_is_refused(train: Train, tmp_path: Path) -> None:
    end = tmp_path / "end.safetensors"
    save_file({"weight/fc.weight": torch.zeros(2, 2)}, end)
    with pytest.raises(ValueError, match=r"parameter fc.weight has shape \(2, 2\), the draft has \("):
        train("work", state=end)
