import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from sqlalchemy import update

from infra import querylog, tables
from infra.erasures import ERASED
from infra.machine import process_place
from infra.querylog import CapturedFiles, QueryLog
from infra.regression_sets import Change
from infra.tables import ENDED
from infra.windows import Window, WindowBusy
from tests.infra.rows import content_of, erase, row, run_python

BOOT = process_place().split(" ")[0]


def claimed(log: QueryLog, owner: str = "run-1", max_rows: int = 2, **lease: float) -> Window:
    window = log.windows.claim(owner, max_rows, **lease)
    assert window is not None
    return window


def change_claim(log: QueryLog, **values: object) -> None:
    with log.database.writing() as connection:
        connection.execute(update(tables.claim).values(values))


def claim_and_die(place: Path | str) -> None:
    script = (
        "import os, signal, sys; from infra.querylog import QueryLog; from tests.infra.rows import address\n"
        "QueryLog(address(sys.argv[1])).windows.claim('run-1', 2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run_python(script, place).returncode == -signal.SIGKILL


def attempt(log: QueryLog) -> tuple[int, bool, str]:
    """Return number, whether it runs and the error of the attempt at the open window."""
    found = log.stats().attempt
    assert found is not None
    return found.number, found.running, found.error


def together(script: str, place: Path | str, names: str) -> list[CompletedProcess[str]]:
    """Run a script under several names at the same time."""
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: run_python(script, place, name), names))


def appended(log: QueryLog, number: int = 1) -> QueryLog:
    log.append([row(f"a{at}") for at in range(1, number + 1)])
    return log


def test_rows_come_back_as_they_went_in_with_rising_seq(log: QueryLog) -> None:
    rows = [row("a1"), row("a2", domain="code"), row("a3", consent="metadata")]
    assert log.append(rows) == 3
    assert log.rows(1, 9) == [rows[0].model_copy(update={"seq": 1}), rows[1].model_copy(update={"seq": 2})]
    assert [found.id for found in log.rows(1, 9, consent="metadata")] == ["a3"]
    assert [[each.seq for each in log.latest(number)] for number in (0, 2, 9)] == [[], [2, 3], [1, 2, 3]]


def test_a_row_without_consent_is_refused_and_its_whole_batch_with_it(log: QueryLog) -> None:
    for refused in (row("b").model_copy(update={"consent": level}) for level in ("none", "metadata")):
        with pytest.raises(ValueError, match="row b has consent"):
            log.append([row("a1"), refused])
    assert log.stats().total == 0
    assert b"prompt of" not in content_of(log)


def test_a_window_holds_the_next_full_rows_and_committing_it_moves_the_cursor(log: QueryLog) -> None:
    log.append([row("a1"), row("a2", consent="metadata"), row("a3"), row("a4"), row("a5", consent="metadata")])
    window = claimed(log)
    assert (window.first_seq, window.last_seq, window.num_rows, window.owner) == (1, 3, 2, "run-1")
    assert log.windows.cursor() == 0
    log.windows.commit(window)
    assert (log.windows.cursor(), log.stats().depth) == (3, 1)
    log.windows.commit(window)
    assert log.windows.cursor() == 3
    following = claimed(log, "run-2")
    assert (following.first_seq, following.last_seq, following.num_rows) == (4, 4, 1)
    assert following.sha256 != window.sha256


def test_no_window_opens_before_enough_rows_wait(log: QueryLog) -> None:
    assert log.windows.claim("run-1", max_rows=10) is None
    log.append([row("a1"), row("a2"), row("a3", consent="metadata")])
    assert log.windows.claim("run-1", max_rows=10, min_rows=3) is None
    with pytest.raises(ValueError, match="min_rows 3 and max_rows 2"):
        log.windows.claim("run-1", max_rows=2, min_rows=3)


def test_the_digest_is_over_content_and_not_over_the_file(log: QueryLog, tmp_path: Path) -> None:
    other = appended(QueryLog(tmp_path / "other.db"), 2)  # a file, whatever the log is
    assert claimed(appended(log, 2), "x").sha256 == claimed(other, "y").sha256
    other.close()


def test_the_same_owner_gets_the_same_window_again_while_new_rows_arrive(log: QueryLog) -> None:
    window = appended(log, 2).windows.claim("run-1", max_rows=10)
    log.append([row("a3")])
    assert log.windows.claim("run-1", max_rows=10, min_rows=5) == window


def test_another_owner_waits_for_a_living_process_until_the_lease_is_over(log: QueryLog) -> None:
    first = claimed(appended(log))
    with pytest.raises(WindowBusy, match="belongs to run-1"):
        log.windows.claim("run-2", max_rows=10)
    change_claim(log, lease_until_ms=0)
    second = log.windows.claim("run-2", max_rows=10)
    assert second == first.model_copy(update={"owner": "run-2"})
    for late in (log.windows.commit, log.windows.release):
        with pytest.raises(ValueError, match="window 1-1 of run-1 is not the open claim: open is 1-1 of run-2"):
            late(first)
    log.windows.commit(second)
    with pytest.raises(ValueError, match="none is open"):
        log.windows.commit(first)


@pytest.mark.parametrize("owner", ["run-1", "run-2"])
def test_the_window_of_a_killed_process_is_free_at_once_with_the_same_range(log, place, owner) -> None:
    appended(log, 2)
    claim_and_die(place)
    log.append([row("a3")])
    window = claimed(log, owner, max_rows=10)
    assert (window.first_seq, window.last_seq, window.num_rows, window.owner) == (1, 2, 2, owner)


def test_a_window_that_failed_three_times_is_set_aside_and_the_rows_after_it_are_claimed(log: QueryLog) -> None:
    sets = appended(log, 5).regression_sets
    sets.apply(Change(reserved=[1, 4], released=[]))
    for number in (1, 2, 3):
        window = claimed(log, f"run-{number}")
        assert (window.first_seq, window.last_seq) == (1, 2)
        assert log.windows.fail(window, f"ValueError: loss {number}") == (number == 3)
    (aside,) = log.stats().set_aside
    assert (aside.first_seq, aside.last_seq, aside.num_rows, aside.num_attempts) == (1, 2, 2, 3)
    assert aside.error == "ValueError: loss 3"
    assert abs(aside.time_ms / 1000 - time.time()) < 60
    assert (log.windows.cursor(), log.stats().depth, log.stats().attempt) == (2, 3, None)
    later = claimed(log)
    assert (later.first_seq, later.last_seq) == (3, 4)
    log.windows.commit(later)
    assert sets.members() == [4]
    assert [found.seq for found in log.replay(9, before_seq=6)] == [3, 5]  # what no run got through comes back nowhere


@pytest.mark.slow
@pytest.mark.parametrize(("num_rows", "first_seq"), [(4, 3), (2, None)])
def test_the_claim_after_three_killed_runs_goes_past_the_window(log, place, num_rows, first_seq) -> None:
    appended(log, num_rows)
    for _ in range(3):
        claim_and_die(place)
    assert attempt(log) == (3, False, ENDED)
    window = log.windows.claim("run-1", 2)
    assert (window and window.first_seq, log.windows.cursor()) == (first_seq, 2)
    assert [(aside.last_seq, aside.error) for aside in log.stats().set_aside] == [(2, ENDED)]


def test_a_failed_window_is_free_at_once_and_tells_its_attempt_and_the_error_before(log: QueryLog) -> None:
    first = claimed(appended(log))
    assert attempt(log) == (1, True, "")
    error = "ValueError: " + "x" * 1000
    log.windows.fail(first, error)
    assert attempt(log) == (1, False, error[:500])
    second = claimed(log, "run-2")
    assert attempt(log) == (2, True, error[:500])
    assert not log.windows.fail(first, "a run that lost the window says nothing of it")
    log.windows.commit(second)
    assert log.stats().attempt is None


def test_a_withdrawn_attempt_leaves_those_before_it(log: QueryLog) -> None:
    log.windows.fail(claimed(appended(log)), "ValueError: NaN")
    log.windows.withdraw(claimed(log, "run-2"))
    assert attempt(log) == (1, False, "ValueError: NaN")
    third = claimed(log, "run-3")
    log.windows.withdraw(third.model_copy(update={"owner": "run-2"}))  # it lost the window
    assert attempt(log)[:2] == (2, True)


def test_what_an_error_quotes_is_erased_with_the_rows(log: QueryLog) -> None:
    log.append([row("a1", subject="s1"), row("a2"), row("a3", subject="s3")])
    for _ in range(3):
        log.windows.fail(claimed(log), "ValueError: prompt of a1")
    assert erase(log, "s3").windows == ()
    assert log.stats().set_aside[0].error == "ValueError: prompt of a1"
    assert [(window.first_seq, window.last_seq) for window in erase(log, "s1").windows] == [(1, 2)]
    assert log.stats().set_aside[0].error == ERASED
    assert b"prompt of a1" not in content_of(log)


@pytest.mark.slow
def test_a_held_window_outlives_its_lease_and_is_free_when_it_is_let_go(log: QueryLog) -> None:
    window = claimed(appended(log), lease_s=0.3)
    with log.windows.hold(window, lease_s=0.3):
        time.sleep(0.6)
        with pytest.raises(WindowBusy, match=f"belongs to run-1 \\(process {os.getpid()}\\)"):
            log.windows.claim("run-2", max_rows=10)
    time.sleep(0.35)
    assert log.windows.claim("run-2", max_rows=10) is not None


def test_a_lease_that_was_lost_is_not_renewed(log: QueryLog) -> None:
    lost = claimed(appended(log), lease_s=0.0)
    taken = claimed(log, "run-2", lease_s=0.2)
    with log.windows.hold(lost, lease_s=0.05):
        time.sleep(0.25)
        assert claimed(log, "run-3") == taken.model_copy(update={"owner": "run-3"})


@pytest.mark.slow
def test_no_row_is_claimed_twice_by_processes_that_race(log: QueryLog, place: Path | str) -> None:
    appended(log, 60)
    script = (
        "import sys, time; from infra.querylog import QueryLog; from tests.infra.rows import address\n"
        "from infra.windows import WindowBusy\n"
        "log = QueryLog(address(sys.argv[1]))\n"
        "while True:\n"
        "    try: window = log.windows.claim(sys.argv[2], 7)\n"
        "    except WindowBusy: time.sleep(0.002); continue\n"
        "    if window is None: break\n"
        "    print(window.first_seq, window.last_seq); log.windows.commit(window)"
    )
    done = together(script, place, "abc")
    ranges = sorted(tuple(map(int, line.split())) for one in done for line in one.stdout.splitlines())
    assert [seq for first, last in ranges for seq in range(first, last + 1)] == list(range(1, 61))


@pytest.mark.slow
def test_processes_may_open_a_new_log_at_the_same_time(place: Path | str) -> None:
    script = (
        "import sys; from infra.querylog import QueryLog; from tests.infra.rows import address, row\n"
        "for n in range(5): QueryLog(address(sys.argv[1])).append([row(f'{sys.argv[2]}{n}')])"
    )
    assert [done.stderr for done in together(script, place, "abc")] == [""] * 3
    log = QueryLog(place)
    assert log.stats().total == 15
    log.close()


def test_replay_takes_the_same_number_of_each_domain_and_the_same_rows_again(log: QueryLog) -> None:
    log.append([row(f"chat-{number}") for number in range(50)])
    log.append([row(f"code-{number}", domain="code") for number in range(5)])
    log.append([row("metadata", domain="rare", consent="metadata"), row("new", domain="new")])
    sample = log.replay(per_domain=8, before_seq=57)
    assert [r.domain for r in sample] == ["chat"] * 8 + ["code"] * 5
    assert [r.seq for r in sample] == sorted(r.seq for r in sample if r.seq)
    assert log.replay(8, 57) == sample
    assert log.replay(8, 57, seed=1) != sample
    assert log.replay(8, 1) == []


def test_erasing_a_subject_removes_its_text_from_the_files_and_names_the_windows(log: QueryLog) -> None:
    log.append([row("a1", subject="s1"), row("a2", subject="s2"), row("a3", subject="s1")])
    window = claimed(log)
    log.windows.commit(window)
    report = erase(log, "s1")
    assert (report.rows, report.windows) == (2, (window,))
    remains = content_of(log)
    assert [f"prompt of a{number}".encode() in remains for number in (1, 2, 3)] == [False, True, False]
    log.append([row("a4")])
    assert [found.seq for found in log.rows(1, 9)] == [2, 4]
    assert erase(log, "nobody").rows == 0


def test_erasing_rows_of_the_open_window_shrinks_it_or_closes_it(log: QueryLog) -> None:
    log.append([row("a1", subject="s1"), row("a2", subject="s2")])
    before = claimed(log)
    erase(log, "s1")
    after = claimed(log)
    assert (after.first_seq, after.last_seq, after.num_rows) == (1, 2, 1)
    assert after.sha256 != before.sha256
    erase(log, "s2")
    assert log.windows.claim("run-2", 10) is None


def test_stats_count_what_is_there(log: QueryLog) -> None:
    log.append([row("a1"), row("a2", domain="code"), row("a3", consent="metadata")], dropped=4)
    log.append([], dropped=1)
    stats = log.stats()
    assert (stats.depth, stats.total, stats.per_domain) == (2, 3, {"chat": 2, "code": 1})
    assert (stats.dropped, stats.duplicates, stats.cursor) == (5, 0, 0)
    assert stats.bytes > 0


def test_rows_that_wait_are_counted_by_domain_and_consent_from_the_cursor_on(log: QueryLog) -> None:
    log.append([row("a1"), row("a2", domain="code")])
    assert log.waiting_domains(1) == {"chat": 1}
    log.windows.commit(claimed(log))
    assert log.waiting() == ({}, None)
    log.append([row("a9"), row("a4", consent="metadata"), row("a5", domain="code"), row("a6", domain="code")])
    assert log.waiting() == ({"chat": {"full": 1, "metadata": 1}, "code": {"full": 2}}, 4)
    assert log.waiting_domains(10) == {"chat": 1, "code": 2}  # of the first that may be trained on
    assert log.waiting_domains(2) == {"chat": 1, "code": 1}


def test_served_tau_is_of_the_newest_rows_that_a_draft_drafted_alone(log: QueryLog) -> None:
    head = {"drafting": "head", "drafted": [3, 3], "accepted": [3, 0]}
    said = [head | {"accepted": [3, 3]}, head, head | {"drafting": "auto", "accepted": [0, 0]}, head]
    log.append([row(f"a{number}", "code").model_copy(update=one) for number, one in enumerate(said, 1)])
    assert log.served_tau("code") == 1 + 12 / 6
    assert log.served_tau("code", num_rows=2) == 1 + 6 / 4
    assert log.served_tau("chat") == 1.0


def test_counts_of_acceptance_are_of_one_draft_what_it_drafted_alone_and_where_that_is_known(log: QueryLog) -> None:
    head = {"drafting": "head", "drafted": [3, 2], "accepted": [3, 0], "draft_version": 7, "server": "host:1"}
    others = [{"draft_version": 6}, {"drafting": "auto"}, {"structured": True}, {"drafted": None}, {"server": None}]
    said = [head, *(head | other for other in others), head | {"accepted": [1, 1], "server": "host:2"}]
    log.append([row(f"a{number}", "code").model_copy(update=one) for number, one in enumerate(said, 1)])
    first, last = (1, "code", 2, 5, 3), (7, "code", 2, 5, 2)
    assert [log.acceptance_counts(7, 0, 9, f"host:{number}") for number in (1, 2, 3)] == [[first], [last], []]
    assert log.acceptance_counts(7, 0, 9) == [first, last]
    assert log.acceptance_counts(7, 1, 9) == log.acceptance_counts(7, 0, 1) == [last]


def test_rows_of_a_writer_in_flight_come_before_those_that_were_written_later(log: QueryLog, place: Path | str) -> None:
    """Else a claim would move the cursor past a row that nobody can see yet, and it would never be trained on."""
    other, began, later = appended(QueryLog(place)), threading.Event(), threading.Event()

    def append(name: str) -> None:
        began.set()
        other.append([row(name)])
        later.set()

    with ThreadPoolExecutor(1) as pool:
        with log.database.writing() as connection:
            querylog._write(connection, [querylog._made(row("a2"))])
            done = pool.submit(append, "a3")
            assert began.wait(60)
            assert not later.wait(0.3)
            assert [found.id for found in QueryLog(place).rows(1, 9)] == ["a1"]
        done.result()
    window = claimed(log, max_rows=9)
    other.close()
    assert (window.last_seq, [found.id for found in log.rows(1, 9)]) == (3, ["a1", "a2", "a3"])


def test_of_rows_whose_writer_was_undone_no_number_is_left_out(log: QueryLog) -> None:
    with pytest.raises(RuntimeError), log.database.writing() as connection:
        querylog._write(connection, [querylog._made(row("a1"))])
        raise RuntimeError
    log.append([row("a2"), row("a2"), row("a3")])
    assert [(found.seq, found.id) for found in log.latest(9)] == [(1, "a2"), (2, "a3")]
    assert log.stats().duplicates == 1


@pytest.mark.parametrize(("where", "free_here"), [("other-boot pid:[1]", True), (f"{BOOT} pid:[1]", False)])
def test_the_claim_of_another_boot_is_free_at_once_only_where_no_other_host_can_be(log, where, free_here) -> None:
    claimed(appended(log))
    change_claim(log, process=f"{where} 1", pid=1)
    if free_here and not log.database.is_shared:
        assert log.windows.claim("run-2", max_rows=10) is not None
        return
    with pytest.raises(WindowBusy, match="belongs to run-1"):
        log.windows.claim("run-2", max_rows=10)
    change_claim(log, lease_until_ms=0)
    assert log.windows.claim("run-2", max_rows=10) is not None


def files_of(tmp_path: Path, ages_s: dict[str, float]) -> CapturedFiles:
    files = CapturedFiles(tmp_path / "queries.db")
    files.make()
    for row_id, age_s in ages_s.items():
        files.path_of(row_id).write_bytes(b"12345")
        os.utime(files.path_of(row_id), (time.time() - age_s,) * 2)
    return files


def test_nothing_is_there_before_anything_is_captured(tmp_path: Path) -> None:
    files = CapturedFiles(tmp_path / "queries.db")
    assert (files.num_bytes(), files.forget(["a"]), files.forget_older_than(0)) == (0, 0, 0)
    assert not files.folder.exists()


def test_the_folder_is_closed_and_a_rows_file_goes_by_its_id(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"a/../b": 0, "c": 0})
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert files.num_bytes() == 10
    assert files.forget(["a/../b", "unknown"]) == 1
    assert list(files.folder.iterdir()) == [files.path_of("c")]


def test_files_go_by_age(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"old": 3 * 24 * 3600, "new": 3600})
    assert files.forget_older_than(2) == 1
    assert list(files.folder.iterdir()) == [files.path_of("new")]


def test_files_without_a_row_go_once_the_row_would_be_there(tmp_path: Path) -> None:
    files = files_of(tmp_path, {"logged": 90, "unlogged": 90, "on its way": 1})
    torn = files.folder / ".torn.states.17"
    torn.write_bytes(b"1")
    os.utime(torn, (1, 1))
    assert files.forget_others(["logged"], older_than_s=60) == 2
    assert {*files.folder.iterdir()} == {files.path_of("logged"), files.path_of("on its way")}
