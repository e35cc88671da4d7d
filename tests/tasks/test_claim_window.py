"""What a refresh trains on and is held to."""

import pytest

from infra.artifacts import Artifact, publish, staged
from infra.consent import QueryRow
from infra.querylog import QueryLog
from infra.registry import Pair, Version
from infra.settings import load_settings
from models.hidden import Sample
from models.recipe import Refresh
from tasks.advance_cursor import advance_cursor
from tasks.claim_window import claim_window, hold_out, hold_window, leave_window
from tasks.stages.samples import part_of, read_samples, write_samples

REFRESH = Refresh(min_rows=40, max_rows=100, held_out_fraction=0.25, replay_per_domain=10)


@pytest.fixture
def log(tmp_path, monkeypatch) -> QueryLog:
    """Return the query log of a fresh home."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    return QueryLog(load_settings().querylog)


@pytest.fixture
def first_samples(tmp_path) -> Artifact:
    """Return what the first draft was trained on; its prompts are those of the log's rows 0 to 7."""
    with staged(tmp_path / "first") as directory:
        write_samples(directory, "train", [Sample(f"t{n}", "chat", [n, 1], [1, 2, 3]) for n in range(30)])
        write_samples(directory, "held_out", [Sample(f"h{n}", "chat", [n, 2], [1, 2, 3]) for n in range(30)])
    return publish(tmp_path / "first", "samples")


@pytest.fixture
def pair() -> Pair:
    """Return a pair whose target is version 1; its files are not looked at."""
    version = Version(kind="target", number=1, sha256="0" * 64, tags={}, created_ms=0)
    files = Artifact(uri="file:///nowhere", sha256="0" * 64, kind="any")
    return Pair(target=version, draft=version, target_files=files, draft_files=files)


def row(number: int, second_id: int = 0) -> QueryRow:
    return QueryRow(
        id=f"row{number}",
        time_ms=0,
        domain="code",
        consent="full",
        scrubber_revision=1,
        target_version=1,
        draft_version=1,
        prompt_ids=[number, second_id],
        completion_ids=[4, 5, 6],
        sampling={"temperature": 0},
        finish_reason="stop",
        speculating=True,
    )


def recipe_of(refresh: Refresh):
    from models.recipe import load_recipe

    return load_recipe("tiny").model_copy(update={"refresh": refresh})


def test_too_few_rows_open_no_window_and_the_same_process_gets_its_window_again(log):
    log.append([row(n) for n in range(39)])
    assert claim_window.fn(REFRESH) is None
    log.append([row(39)])
    window = claim_window.fn(REFRESH)
    assert (window.first_seq, window.last_seq) == (1, 40)
    log.append([row(n) for n in range(40, 50)])
    assert claim_window.fn(REFRESH) == window
    advance_cursor.fn(window)
    assert log.cursor() == 40


def test_a_window_whose_training_always_fails_is_set_aside_with_its_error_and_later_rows_train(log):
    log.append([row(n) for n in range(REFRESH.max_rows + 40)])
    for _ in range(3):
        window = claim_window.fn(REFRESH)
        assert window.first_seq == 1
        with pytest.raises(ZeroDivisionError, match="^the loss\nis NaN$"), hold_window(window):
            raise ZeroDivisionError("the loss\nis NaN")
    (aside,) = log.stats().set_aside
    assert (aside.last_seq, aside.error) == (REFRESH.max_rows, "ZeroDivisionError: the loss is NaN")
    window = claim_window.fn(REFRESH)
    assert window.first_seq == REFRESH.max_rows + 1
    with hold_window(window):
        advance_cursor.fn(window)
    assert (log.stats().depth, log.stats().attempt, log.stats().set_aside) == (0, None, (aside,))


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, SystemExit])
def test_a_run_that_somebody_stops_is_no_attempt(log, stopped_by):
    log.append([row(n) for n in range(REFRESH.max_rows)])
    for _ in range(5):
        window = claim_window.fn(REFRESH)
        with pytest.raises(stopped_by), hold_window(window):
            raise stopped_by
    assert (log.stats().attempt, log.stats().set_aside) == (None, ())
    assert claim_window.fn(REFRESH) == window


def test_a_window_that_was_left_comes_again_and_nothing_was_counted(log):
    log.append([row(n) for n in range(40)])
    for _ in range(5):
        window = claim_window.fn(REFRESH)
        with hold_window(window):
            leave_window.fn(window)
    assert (log.stats().attempt, log.stats().set_aside, log.cursor()) == (None, (), 0)
    assert claim_window.fn(REFRESH) == window


def test_what_a_run_raised_is_raised_again_where_the_log_can_not_be_written(log):
    log.append([row(n) for n in range(40)])
    window = claim_window.fn(REFRESH)
    with pytest.raises(ZeroDivisionError), hold_window(window):
        log.path.write_bytes(b"no database" * 1000)
        raise ZeroDivisionError
    log.path.unlink()


def test_window_replay_and_first_samples_are_mixed_and_no_question_is_on_both_sides(log, first_samples, pair):
    log.append([row(n) for n in range(40)])
    advance_cursor.fn(claim_window.fn(REFRESH))
    log.append(
        [row(n, second_id=1 if n < 8 else 0) for n in range(40, 90)] + [row(n, second_id=1) for n in range(200, 210)]
    )
    window = claim_window.fn(REFRESH)
    samples = hold_out.fn(recipe_of(REFRESH), pair, window, first_samples)
    train, held_out = read_samples(samples, "train"), read_samples(samples, "held_out")

    of_log = [one for one in train + held_out if one.id.startswith("row")]
    assert len(of_log) == window.num_rows + REFRESH.replay_per_domain
    assert all((one in held_out) == (part_of(one.prompt_ids, 0.25) == "held_out") for one in of_log)
    assert sum(one.id.startswith("t") for one in train) == REFRESH.replay_per_domain
    assert not {tuple(one.prompt_ids) for one in train} & {tuple(one.prompt_ids) for one in held_out}
    assert len({one.id for one in train + held_out}) == len(train + held_out)


def test_a_question_of_the_first_samples_that_traffic_asks_again_changes_sides_with_it(log, first_samples, pair):
    log.append([row(n, second_id=1) for n in range(30)] + [row(100 + n) for n in range(30)])
    window = claim_window.fn(REFRESH)
    samples = hold_out.fn(recipe_of(REFRESH), pair, window, first_samples)
    trained = {tuple(one.prompt_ids) for one in read_samples(samples, "train")}
    assert not any(tuple(one.prompt_ids) in trained for one in read_samples(samples, "held_out"))
