"""What a person asked is nowhere in a home after an erasure, and all else is where it was."""

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flows import home_commands
from flows.command import complete_erasures
from infra.consent import QueryRow, subject_of
from infra.database import Database
from infra.erase import certificate_file, erase_older_than, erase_subject, finish_erasures
from infra.files import lock_folder
from infra.keys import add_key, keys_path, read_keys, revoke_key
from infra.querylog import QueryLog
from infra.settings import Settings
from tests.conftest import ODD_NAME
from tests.infra.conftest import new_schema
from tests.infra.erase.planted import GROUP, SUBJECT, WHO, check_erased, make_home, needles, planted_in, planted_row
from tests.infra.rows import ROOT, content_of


@pytest.fixture
def settings(tmp_path: Path, store: Path) -> Settings:
    """Return a home with a person's text in it."""
    return make_home(tmp_path / ODD_NAME, store)


@pytest.mark.slow
def test_what_a_person_asked_is_nowhere_in_the_home_and_all_else_is_where_it_was(settings: Settings) -> None:
    before = planted_in(settings.home)
    assert {"queries.db", "logs/service.log", "logs/old.log.gz", "logs/old.log.xz", "logs/old.log.bz2"} < set(before)
    assert {"prefect/prefect.db", "prefect/results/result", "post_promotion/work/rows.json"} < set(before)
    assert sum(name.startswith("artifacts/window/") for name in before) == 6
    certificate = erase_subject(settings, WHO)
    assert (certificate.rows, SUBJECT in certificate.subjects) == (4, True)
    check_erased(settings.model_copy())
    assert erase_subject(settings, SUBJECT).rows == 0


@pytest.mark.slow
@pytest.mark.postgres
def test_it_is_nowhere_in_a_log_on_postgres_either_after_an_erasure_that_was_killed_before_its_end(
    tmp_path: Path, store: Path, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = new_schema(postgres)
    settings = make_home(tmp_path / "home", store, next(schemas))
    log, mine = QueryLog(settings.querylog), [one for one in needles() if one != GROUP.encode() and b"mine-" not in one]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Database, "vacuum", killed)
        erase_subject(settings, WHO)
    assert any(one in content_of(log) for one in mine)
    (certificate,) = finish_erasures(settings)
    assert certificate.rows == 4
    check_erased(settings)
    remains = content_of(log)
    assert [one for one in mine if one in remains] == []
    log.close()
    next(schemas, None)


@pytest.mark.slow
def test_rows_go_by_age_in_the_same_way(settings: Settings) -> None:
    log = QueryLog(settings.querylog)
    log.append([planted_row(20, "somebody", time_ms=10**15)])
    assert erase_older_than(settings, days=1).rows == 12
    assert [row.id for row in log.rows(1, 99)] == ["other-20"]
    assert planted_in(settings.home) == []
    log.close()


@pytest.mark.slow
def test_an_erasure_hides_rows_at_once_and_waits_for_whoever_reads_them(settings: Settings) -> None:
    log = QueryLog(settings.querylog)
    with log.reading():
        with pytest.raises(TimeoutError, match="is at its rows"):
            erase_subject(settings, WHO, wait_s=0.3)
        assert not any(row.subject == SUBJECT for row in log.rows(1, 99))
        assert (settings.artifacts / "window" / "aaaa" / "manifest.json").is_file()
        with pytest.raises(TimeoutError):
            finish_erasures(settings)
    (certificate,) = finish_erasures(settings)
    assert certificate.rows == 4
    check_erased(settings)
    log.close()


def test_a_reader_waits_until_an_erasure_is_done(settings: Settings) -> None:
    log, order = QueryLog(settings.querylog), []

    def read() -> None:
        with log.reading():
            order.append("read")

    with log.unread(wait_s=0):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.3)
        order.append("erased")
    thread.join()
    assert order == ["erased", "read"]


def test_the_work_folder_of_a_build_that_runs_stays(settings: Settings) -> None:
    with lock_folder(settings.artifacts / "work" / "hidden"):
        erase_subject(settings, WHO)
    assert (settings.artifacts / "work" / "hidden" / "states.bin").is_file()


def test_what_others_said_too_is_not_touched(settings: Settings) -> None:
    file = settings.home / "logs" / "shared.log"
    text = planted_row(1, "somebody").prompt or ""
    file.write_text(text)
    erase_subject(settings, WHO)
    assert file.read_text() == text


@pytest.mark.slow
def test_whatever_starts_completes_an_erasure_that_was_killed(settings: Settings, capsys) -> None:
    log = QueryLog(settings.querylog)
    log.erasures.begin(subjects=(SUBJECT,))
    with log.reading():
        complete_erasures(settings)
    assert "an erasure is not complete" in capsys.readouterr().out
    complete_erasures(settings)
    assert capsys.readouterr().out == "erasure 1 is complete\n"
    check_erased(settings)
    log.close()


@pytest.mark.slow
def test_the_command_says_what_was_done(settings: Settings) -> None:
    said = redraft(settings, "erase", "--subject", WHO)
    assert "erased 4 rows, 1 of them in regression sets; 2 snapshots written again" in said
    assert "draft 3 saw 1 as held_out, 1 as regression, 1 as replay, 1 as train" in said
    assert "trained on from these: 5" in said
    check_erased(settings)
    assert redraft(settings, "erase") == "no erasure was interrupted\n"
    assert redraft(settings, "retain", "--days", "1").startswith("erased 8 rows, 1 of them in regression sets;")


def redraft(settings: Settings, *arguments: str) -> str:
    argv = [sys.executable, "-m", "flows.cli", *arguments]
    environment = {"REDRAFT_HOME": str(settings.home), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_person_is_found_under_each_key_that_was_ever_accepted(settings: Settings) -> None:
    add_key(keys_path(settings), "team", "client")
    revoke_key(keys_path(settings), "team")
    (key,) = read_keys(keys_path(settings))
    asked = QueryRow(**planted_row(99).model_dump() | {"subject": subject_of(key.sha256, WHO)})
    QueryLog(settings.querylog).append([asked])
    assert erase_subject(settings, WHO).rows
    assert asked.id not in {row.id for row in QueryLog(settings.querylog).rows(1, 10**6)}


def test_a_name_that_looks_like_a_hash_is_found_under_each_key_too(settings: Settings) -> None:
    add_key(keys_path(settings), "team", "client")
    (key,) = read_keys(keys_path(settings))
    name = hashlib.sha256(b"ann").hexdigest()  # what OpenAI advises clients to send
    log = QueryLog(settings.querylog)
    for number, subject in enumerate((subject_of(key.sha256, name), subject_of(None, name), name), 90):
        log.append([planted_row(number).model_copy(update={"subject": subject})])
    assert erase_subject(settings, name).rows == 3
    log.close()


def test_a_row_is_found_by_each_name_that_its_request_gave(settings: Settings) -> None:
    log, ann, bob = QueryLog(settings.querylog), subject_of(None, "ann"), str(subject_of(None, "bob"))
    log.append([planted_row(number).model_copy(update={"subject": ann, "aliases": [bob]}) for number in (90, 91)])
    assert erase_subject(settings, "bob").rows == 2
    assert erase_subject(settings, "ann").rows == 0
    log.close()


def test_an_erasure_that_finds_nothing_says_so_and_writes_no_certificate(settings: Settings, capsys) -> None:
    before = planted_in(settings.home)
    home_commands._show(settings, certificate := erase_subject(settings, "nobody"))
    assert "found no such row" in capsys.readouterr().out
    log = QueryLog(settings.querylog)
    with log.reading():  # nothing is waited for
        assert erase_subject(settings, "nobody", wait_s=0).rows == 0
    assert certificate.number < log.erasures.last()  # by which the service forgets its recent answers
    assert not certificate_file(settings, certificate.number).exists()
    assert planted_in(settings.home) == before
    home_commands._show(settings, erase_older_than(settings, days=10**6))
    assert "found no such row" in capsys.readouterr().out
    assert finish_erasures(settings) == []


def test_what_completes_an_interrupted_erasure_tells_of_that_one(settings: Settings) -> None:
    begun = QueryLog(settings.querylog).erasures.begin(subjects=(SUBJECT,))
    assert erase_subject(settings, WHO).number == begun.number
    assert certificate_file(settings, begun.number).is_file()
