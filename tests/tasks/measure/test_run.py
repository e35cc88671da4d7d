"""Copies in a home of its own: of what is served, and of a log."""

import shutil
from pathlib import Path

import pytest

from infra.home import home_secret
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings
from infra.trigger_store import TriggerStore
from infra.triggers import Retry
from infra.versions import predecessors
from tasks.measure.run import copy_log, copy_served
from tests.infra.rows import row
from tests.tags import register


@pytest.fixture
def homes(store: Path, tmp_path: Path) -> list[Settings]:
    """Two homes with an empty registry each."""
    found = [Settings(home=tmp_path / name) for name in ("source", "copy")]
    for one in found:
        one.home.mkdir()
        shutil.copy(store, one.home)
    return found


@pytest.mark.slow
def test_a_draft_that_returned_is_copied_with_its_line_and_without_whom_it_was_judged_against(
    homes: list[Settings], tmp_path: Path
) -> None:
    source, home = homes
    registry, made_by = open_registry(source), '[{"target": {"name": "random"}}]'
    for kind, tags in (
        ("target", {"made_by": made_by}),
        ("draft", {}),
        ("draft", {"parent": "1", "gate": "passed"}),
        ("draft", {"parent": "1", "gate": "passed", "gated_against": "2", "returns_for": "chat"}),
    ):
        registry.promote(kind, register(registry, kind, tmp_path, **tags).number)
    assert copy_served(source, home).originals == (1, 3)
    copies = open_registry(home)
    champion, target = copies.champion("draft"), copies.champion("target")
    assert target.tags["made_by"] == made_by  # else no recipe is known to be its own
    assert [one.number for one in predecessors(copies, champion)] == [2, 1]


def test_a_copied_log_goes_on_where_the_original_stands_and_splits_alike(homes: list[Settings]) -> None:
    source, home = homes
    for one, number in ((source, 2), (home, 1)):
        versions = [register(open_registry(one), "draft", one.home) for _ in range(2)]
        open_registry(one).promote("draft", versions[number - 1].number)
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


def test_a_home_that_logged_nothing_is_refused(homes: list[Settings]) -> None:
    with pytest.raises(ValueError, match="there is nothing in query log"):
        copy_log(*homes)
