"""The table of answers' sources: rows begin with one head that has served, and differ in whose answers it learns."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models import catalog
from models.core.learning.hidden import Sample, hidden_states
from models.drafts import Draft
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, Row, sources
from tests.tasks.measure.benches import random_texts

ROWS = {row.name: row for row in sources.rows(0.05)}


@pytest.fixture(scope="module")
def bench_at(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bench]:
    texts = random_texts(16, 24)
    return lambda: Bench(tiny_target, texts, texts, 0.05, tmp_path_factory.mktemp("cell"))


@pytest.fixture(scope="module")
def head(bench_at: Callable[[], Bench]) -> Draft:
    bench = bench_at()
    return lesson.head(bench._replace(train={"chat": bench.train["chat"][::2]}), 0)


def test_every_source_has_a_row_and_so_has_the_head_as_it_served() -> None:
    of_one_domain = [name for name in catalog.names("answers") if name != "rationales"]
    assert list(ROWS) == [*of_one_domain, sources.AS_SERVED]
    assert {"target", "on_policy", "mixed_requests", "mixed_tokens", "rejected"} < set(ROWS)
    assert sources.BASELINE in ROWS


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.name)
def test_a_row_has_all_columns_and_learns_as_many_tokens_as_the_others(row: Row, bench_at: Callable[[], Bench]) -> None:
    found = sources.measure(bench_at(), row, seed=0)
    assert found.keys() == sources.COLUMNS.keys()
    assert all(1 <= float(found[name]) <= 1 + lesson.NUM_DRAFT_TOKENS for name in ("tau", "tau_sampled"))
    if row.name == sources.AS_SERVED:
        assert (found["tokens_k"], found["train_s"]) == (0, 0)
    else:
        epoch = lesson.num_answers(bench_at()) * (lesson.PROMPT_LENGTH + lesson.ANSWER_LENGTH) / 1000
        assert found["tokens_k"] == pytest.approx(lesson.TRAINING["num_epochs"] * epoch, rel=0.15)
        assert found["train_s"] > 0


@pytest.mark.slow
def test_no_row_changes_the_head_that_the_others_begin_with(head: Draft, bench_at: Callable[[], Bench]) -> None:
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    sources.measure(bench_at(), ROWS["rejected"], seed=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in head.state_dict().items())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_and_one_document_is_too_few(bench_at: Callable[[], Bench]) -> None:
    once, again = (sources.measure(bench_at(), ROWS[sources.AS_SERVED], seed=1) for _ in range(2))
    assert [float(value) for value in once.values()] == [float(value) for value in again.values()]
    with pytest.raises(ValueError, match="no document of two tokens"):
        sources.measure(bench_at()._replace(train={"chat": [[3] * 8]}), ROWS["target"], seed=0)
