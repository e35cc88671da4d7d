"""Tables of drafts, losses and answers' sources: rows learn alike, and what is learnt is accepted."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.core.learning.hidden import Sample, hidden_states
from models.drafts import Draft
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, drafts, losses, sources
from tests.tasks.measure.benches import bench_of, random_texts

pytestmark = pytest.mark.slow

FAMILIES = {row.name: row for row in drafts.rows(0.05)}
LOSSES = {row.name: row for row in losses.rows(0.05)}
SOURCES = {row.name: row for row in sources.rows(0.05)}
ANSWERS = lesson.PROMPT_LENGTH + lesson.ANSWER_LENGTH


@pytest.fixture(scope="module")
def bench_at(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bench]:
    texts = random_texts(16, 24)
    return lambda: Bench(tiny_target, texts, texts, 0.05, tmp_path_factory.mktemp("cell"))


@pytest.fixture(scope="module")
def head(bench_at: Callable[[], Bench]) -> Draft:
    bench = bench_at()
    return lesson.head(bench._replace(train={"chat": bench.train["chat"][::2]}), 0)


def within_bounds(found: dict[str, float]) -> bool:
    return all(1 <= float(found[name]) <= 1 + lesson.NUM_DRAFT_TOKENS for name in ("tau", "tau_sampled"))


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_family_has_all_columns(name: str, tiny_target: Path, tmp_path: Path) -> None:
    row = FAMILIES[name]._replace(settings={**FAMILIES[name].settings, "num_epochs": 1})
    found = drafts.measure(bench_of(tiny_target, tmp_path, end=259), row, seed=3)
    assert found.keys() == drafts.COLUMNS.keys()
    assert found["parameters_m"] > 0 and within_bounds(found)


def test_under_a_loss_the_same_seed_gives_the_same(tiny_target: Path, tmp_path: Path) -> None:
    benches = [bench_of(tiny_target, tmp_path / str(number), end=259) for number in (1, 2)]
    one, again = (losses.measure(bench, LOSSES["lk_hybrid"], seed=3) for bench in benches)
    assert one.keys() == losses.COLUMNS.keys() and within_bounds(one)
    assert [float(one[name]) for name in ("tau", "tau_sampled")] == [again["tau"], again["tau_sampled"]]


def test_what_is_learnt_is_accepted(tiny_target: Path, tmp_path: Path) -> None:
    taus, settings = [], LOSSES["forward_kl"].settings
    for num_epochs in (1, 60):
        bench = bench_of(tiny_target, tmp_path / str(num_epochs), end=259)
        row = LOSSES["forward_kl"]._replace(settings={**settings, "num_epochs": num_epochs})
        taus.append(losses.measure(bench, row, seed=0)["tau"])
    assert taus[1] > taus[0] + 0.1


def test_refusals_are_those_of_serving_the_logged_answers(head: Draft, bench_at: Callable[[], Bench]) -> None:
    samples = sources.served(head, bench_at(), seed=0)
    assert len(samples) == lesson.num_answers(bench_at())
    for sample in samples:
        assert sample.rejected == by_hand(head, sample, bench_at())


@torch.inference_mode()
def by_hand(head: Draft, sample: Sample, bench: Bench) -> list[int]:
    """Serve an answer with the head's own drafter: its tokens count up to the first that the answer has not."""
    states, _ = hidden_states(head, bench.target_dir, [sample], bench.work_dir).read(sample)
    tapped = states[:, : len(head.taps) * head.config["hidden_size"]].float()
    answer, drafter = sample.completion_ids, head.drafter(len(sample.token_ids) + lesson.NUM_DRAFT_TOKENS)
    read, place, refused = 0, 1, []
    while place < len(answer):
        certain = len(sample.prompt_ids) + place
        drafter.extend(torch.tensor(sample.token_ids[read:certain]), tapped[read : certain - 1])
        read = certain - 1
        drafted = drafter.propose(3, lambda logits: (int(head.vocabulary[logits.argmax()]), None)).token_ids[0]
        judged = answer[place : place + 3]
        same = [one == other for one, other in zip(drafted.tolist(), judged, strict=False)]
        place += [*same, False].index(False)
        if not all(same):
            refused.append(place)
        place += 1
    return refused


@pytest.mark.parametrize("name", ["target", "on_policy", "mixed_requests", "rejected"])
def test_all_sources_learn_as_many_tokens_and_leave_the_head_that_others_begin_with(
    name: str, head: Draft, bench_at: Callable[[], Bench]
) -> None:
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    found = sources.measure(bench_at(), SOURCES[name], seed=0)
    assert found.keys() == sources.COLUMNS.keys() and within_bounds(found)
    epoch = lesson.num_answers(bench_at()) * ANSWERS / 1000
    assert found["tokens_k"] == pytest.approx(lesson.TRAINING["num_epochs"] * epoch, rel=0.15)
    assert found["train_s"] > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


def test_as_served_nothing_is_learnt_a_seed_gives_the_same_and_one_document_is_too_few(
    bench_at: Callable[[], Bench],
) -> None:
    once, again = (sources.measure(bench_at(), SOURCES[sources.AS_SERVED], seed=1) for _ in range(2))
    assert [float(value) for value in once.values()] == [float(value) for value in again.values()]
    assert (once["tokens_k"], once["train_s"]) == (0, 0) and within_bounds(once)
    with pytest.raises(ValueError, match="no document of two tokens"):
        sources.measure(bench_at()._replace(train={"chat": [[3] * 8]}), SOURCES["target"], seed=0)
