"""Copies in a home of its own: of what is served, and of a log."""

import shutil
from pathlib import Path

import pytest

from infra.artifacts import staged
from infra.lines import predecessors
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.secret import home_secret
from infra.settings import Settings
from infra.trigger_store import TriggerStore
from infra.triggers import Retry
from tasks.measure.run import copy_log, copy_served
from tests.infra.rows import row
from tests.tags import draft_tags


def settings(home: Path) -> Settings:
    home.mkdir()
    return Settings(home=home)


@pytest.mark.slow
def test_a_draft_that_returned_is_copied_with_its_line_and_without_whom_it_was_judged_against(
    store: Path, tmp_path: Path
) -> None:
    source, home = settings(tmp_path / "source"), settings(tmp_path / "home")
    for one in (source, home):
        shutil.copy(store, one.home)
    registry = open_registry(source)

    def register(kind: str, **tags: str) -> None:
        number = len(registry.versions(kind)) + 1
        with staged(tmp_path / f"{kind} {number}") as directory:
            (directory / "weights").write_text(str(tags))
        registry.register(kind, tmp_path / f"{kind} {number}", draft_tags(**tags))
        registry.promote(kind, number)

    register("target", made_by='[{"target": {"name": "random"}}]')
    register("draft")
    register("draft", parent="1", gate="passed")
    register("draft", parent="1", gate="passed", gated_against="2", returns_for="chat")
    served = copy_served(source, home)
    assert served.originals == (1, 3)
    copies = open_registry(home)
    champion, target = copies.champion("draft"), copies.champion("target")
    assert target.tags["made_by"] == '[{"target": {"name": "random"}}]'  # else no recipe is known to be its own
    assert [one.number for one in predecessors(copies, champion)] == [2, 1]


def test_a_copied_log_goes_on_where_the_original_stands_and_splits_alike(store: Path, tmp_path: Path) -> None:
    source, home = settings(tmp_path / "source"), settings(tmp_path / "copy")
    for one, number in ((source, 2), (home, 1)):
        shutil.copy(store, one.home)
        for name in ("first", "second"):
            with staged(one.home / name) as directory:
                (directory / "weights").write_text(name)
            open_registry(one).register("draft", one.home / name, draft_tags())
        open_registry(one).promote("draft", number)
    log = QueryLog(source.querylog)
    log.append([row(f"a{number}") for number in range(8)])
    window = log.windows.claim("refresh 1", max_rows=5)
    log.windows.commit(window)
    with TriggerStore(source.querylog).run(Retry(first_s=1, most_s=1)):
        copy_log(source, home)
    assert (open_registry(home).champion("draft").number, TriggerStore(home.querylog).state().last_run) == (1, None)
    copy = QueryLog(home.querylog)
    assert (copy.windows.cursor(), copy.stats().depth, copy.windows.last()) == (5, 3, log.windows.last())
    assert home_secret(home.home) == home_secret(source.home)
    log.append([row("a9")])
    copy_log(source, home)  # once
    assert copy.stats().total == 8


def test_a_home_that_logged_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is nothing in query log"):
        copy_log(settings(tmp_path / "source"), settings(tmp_path / "copy"))
