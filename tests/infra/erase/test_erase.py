"""What a person asked is nowhere in a home after an erasure, and all else is where it was."""

import hashlib
import shutil
import threading
from pathlib import Path

import pytest

from flows import home_commands
from flows.command import complete_erasures
from infra.consent import subject_of
from infra.database import Database
from infra.erase import certificate_file, erase_older_than, erase_subject, finish_erasures
from infra.files import lock_folder
from infra.keys import add_key, keys_path, read_keys, revoke_key
from infra.querylog import QueryLog
from infra.settings import Settings
from tests.conftest import ODD_NAME
from tests.infra.conftest import new_schema
from tests.infra.erase.planted import GROUP, SUBJECT, WHO, check_erased, make_home, needles, planted_in, planted_row
from tests.infra.rows import content_of


@pytest.fixture
def settings(tmp_path: Path, store: Path) -> Settings:
    return make_home(tmp_path / ODD_NAME, store)


@pytest.fixture
def plain(tmp_path: Path, store: Path) -> Settings:
    """Return a home of rows alone, of which there is none."""
    settings = Settings(home=tmp_path / "plain")
    settings.home.mkdir()
    shutil.copy(store, settings.home / "mlflow.db")
    return settings


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
    tmp_path, store, postgres, monkeypatch
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
def test_an_erasure_hides_rows_at_once_waits_for_who_reads_them_and_whatever_starts_completes_it(settings, capsys):
    log = QueryLog(settings.querylog)
    with log.reading():
        with pytest.raises(TimeoutError, match="is at its rows"):
            erase_subject(settings, WHO, wait_s=0.3)
        assert not any(row.subject == SUBJECT for row in log.rows(1, 99))
        assert (settings.artifacts / "window" / "aaaa" / "manifest.json").is_file()
        with pytest.raises(TimeoutError):
            finish_erasures(settings)
        complete_erasures(settings)
    assert "an erasure is not complete" in capsys.readouterr().out
    complete_erasures(settings)
    assert capsys.readouterr().out == "erasure 1 is complete\n"
    check_erased(settings)
    log.close()


def test_a_reader_waits_until_an_erasure_is_done(plain: Settings) -> None:
    log, order = QueryLog(plain.querylog), []

    def read() -> None:
        with log.reading():
            order.append("read")

    with log.unread(wait_s=0):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(0.2)
        order.append("erased")
    thread.join()
    assert order == ["erased", "read"]


def test_the_work_folder_of_a_build_that_runs_stays_and_what_others_said_too(settings: Settings) -> None:
    file, text = settings.home / "logs" / "shared.log", planted_row(1, "somebody").prompt or ""
    file.write_text(text)
    with lock_folder(settings.artifacts / "work" / "hidden"):
        erase_subject(settings, WHO)
    assert (settings.artifacts / "work" / "hidden" / "states.bin").is_file()
    assert file.read_text() == text


@pytest.mark.slow
def test_the_command_says_what_was_done(settings, capsys, monkeypatch, own_environment) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(settings.home))
    home_commands.erase(WHO)
    said = capsys.readouterr().out
    assert "erased 4 rows, 1 of them in regression sets; 2 snapshots written again" in said
    assert "draft 3 saw 1 as held_out, 1 as regression, 1 as replay, 1 as train" in said
    assert "trained on from these: 5" in said
    check_erased(settings)
    home_commands.erase()
    assert capsys.readouterr().out == "no erasure was interrupted\n"
    home_commands.retain(days=1)
    assert capsys.readouterr().out.startswith("erased 8 rows, 1 of them in regression sets;")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused_so_that_nobody_believes_it_erased(name: str) -> None:
    with pytest.raises(ValueError, match=f'--subject is "{name}", wanted a name or a hash'):
        home_commands.erase(name)


@pytest.mark.parametrize(("name", "num_rows"), [("ann", 2), (hashlib.sha256(b"ann").hexdigest(), 3)])
def test_a_person_is_found_under_each_key_that_was_ever_accepted_also_by_what_looks_like_a_hash(plain, name, num_rows):
    add_key(keys_path(plain), "team", "client")
    revoke_key(keys_path(plain), "team")
    (key,) = read_keys(keys_path(plain))
    log, subjects = QueryLog(plain.querylog), (subject_of(key.sha256, name), subject_of(None, name), name)
    for number, subject in enumerate(subjects[:num_rows]):  # a hash is what OpenAI advises clients to send
        log.append([planted_row(number).model_copy(update={"subject": subject})])
    assert erase_subject(plain, name).rows == num_rows
    assert log.rows(1, 99) == []
    log.close()


def test_a_row_is_found_by_each_name_that_its_request_gave(plain: Settings) -> None:
    log, ann, bob = QueryLog(plain.querylog), subject_of(None, "ann"), str(subject_of(None, "bob"))
    log.append([planted_row(number).model_copy(update={"subject": ann, "aliases": [bob]}) for number in (90, 91)])
    assert (erase_subject(plain, "bob").rows, erase_subject(plain, "ann").rows) == (2, 0)
    log.close()


def test_an_erasure_that_finds_nothing_says_so_and_writes_no_certificate(plain: Settings, capsys) -> None:
    log = QueryLog(plain.querylog)
    log.append([planted_row(0)])
    home_commands._show(plain, certificate := erase_subject(plain, "nobody"))
    assert "found no such row" in capsys.readouterr().out
    with log.reading():  # nothing is waited for
        assert erase_subject(plain, "nobody", wait_s=0).rows == 0
    assert certificate.number < log.erasures.last()  # by which the service forgets its recent answers
    assert not certificate_file(plain, certificate.number).exists()
    home_commands._show(plain, erase_older_than(plain, days=10**6))
    assert "found no such row" in capsys.readouterr().out
    assert finish_erasures(plain) == []
    assert [row.id for row in log.rows(1, 99)] == ["mine-0"]
    log.close()


def test_what_completes_an_interrupted_erasure_tells_of_that_one(plain: Settings) -> None:
    log = QueryLog(plain.querylog)
    log.append([planted_row(0)])
    begun = log.erasures.begin(subjects=(SUBJECT,))
    assert erase_subject(plain, WHO).number == begun.number
    assert certificate_file(plain, begun.number).is_file()
    log.close()
