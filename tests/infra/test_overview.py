"""What is told of a home: its drafts by their standing, and that nothing runs."""

import os
import shutil
from pathlib import Path

import pytest

from infra.home import serving
from infra.machine import process_identity
from infra.overview import Gated, links, overview
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.rollout_store import RolloutStore
from infra.rollouts import Joined, Seen
from infra.settings import Settings
from infra.supervisor import STATE, UpState
from infra.trigger_store import LastLook, TriggerStore, now_ms
from infra.versions import Target
from infra.views.gate import write_files
from infra.windows import Window
from models.types import RolloutParams
from tests.conftest import judge
from tests.infra.conftest import Make
from tests.infra.rows import row
from tests.tags import draft_tags

TRAINED = Window(first_seq=1, last_seq=60, num_rows=60, sha256="1" * 64, owner="anyone")


@pytest.fixture
def settings(store: Path, checkpoint: Make, tmp_path: Path) -> Settings:
    """A home with three drafts: the first is the champion, the second was refused, the third is quarantined."""
    settings = Settings(home=tmp_path / "home")
    settings.home.mkdir()
    shutil.copy(store, settings.home)
    registry = open_registry(settings)
    trained = {"window_first_seq": "1", "window_last_seq": "60", "window_sha256": "1" * 64, "parent": "1"}
    refused = {"gate": "refused", "gate_reasons": "no gain", **trained}
    for number, tags in enumerate(({"tau": '{"chat": 1.5}'}, refused, {})):
        registry.register("draft", checkpoint(f"draft {number}"), draft_tags(**tags))
    registry.promote("draft", 1)
    registry.quarantine("draft", 3, "another output")
    return settings


def test_drafts_are_told_newest_first_with_rows_and_verdict(settings: Settings) -> None:
    seen = overview(settings)
    third, second, first = seen.drafts
    assert (first.version, first.champion, first.tau, first.rows, first.verdict) == (1, True, {"chat": 1.5}, "", "")
    assert (second.parent, second.rows, second.verdict, second.reasons) == ("1", "1–60", "refused", "no gain")
    assert (third.champion, third.verdict, third.reasons) == (False, "quarantined", "another output")
    assert seen.last_refresh == second  # the newest draft of served requests
    assert (seen.service, seen.attached, seen.programs, seen.log.total) == (None, (), (), 0)
    assert (seen.target, seen.last_gate, seen.links) == ("", None, {})


def test_target_last_gate_and_pages_are_told(settings: Settings, checkpoint: Make, tmp_path: Path) -> None:
    registry, report = open_registry(settings), judge({"chat": 0.2}).origin(1, TRAINED)
    tags = draft_tags(target_name="SmolLM2-135M-Instruct")
    registry.register("target", checkpoint("target"), {name: tags[name] for name in Target.tag_names()})
    registry.promote("target", 1)
    evidence = write_files(report, tmp_path)
    registry.register("draft", checkpoint("draft 4"), draft_tags(gate="passed", parent="1"), {}, evidence)
    (settings.home / "report.html").touch()
    seen = overview(settings)
    assert seen.target == "SmolLM2-135M-Instruct, version 1"
    assert seen.last_gate == Gated(draft=4, report=report)
    assert seen.links == {"report": (settings.home / "report.html").as_uri()}


def test_the_pages_of_what_runs_are_told_and_what_starts_with_since_when(settings: Settings) -> None:
    records = [
        {"name": name, "url": f"http://127.0.0.1:{port}", "pid": 1, "restarts": 0, "ready": True, "log": ""}
        for name, port in (("prefect", 4200), ("mlflow", 5000), ("runner", 1))
    ]
    own = {"pid": os.getpid(), "identity": process_identity(os.getpid()), "recipe": "tiny", "programs": records}
    (settings.home / STATE).write_text(UpState.model_validate(own).model_dump_json())
    with serving(settings.home, "http://127.0.0.1:8000"):
        seen = overview(settings)
    assert seen.links == {
        "MLflow": "http://127.0.0.1:5000/#/models/draft/versions/1",
        "Prefect": "http://127.0.0.1:4200/runs",
    }
    assert seen.service_since_ms is not None and 0 <= now_ms() - seen.service_since_ms < 60_000
    assert seen.waiting.words.startswith("the first look whether a refresh is due, in ")


@pytest.mark.parametrize(
    ("uri", "linked"),
    [
        ("https://mlflow.example/", {"MLflow": "https://mlflow.example/#/models/draft"}),
        ("https://ann:secret@mlflow.example", {}),
    ],
)
def test_a_shared_mlflow_is_linked_unless_its_address_has_a_password(tmp_path, uri, linked) -> None:
    assert links(Settings(home=tmp_path, mlflow_uri=uri), None, None) == linked


def test_the_servers_that_a_process_follows_are_told(settings: Settings) -> None:
    names = ("http://0", "http://1")
    seen_of = {"version": "2-abc", "proven": True, "failed": {}}
    looks = [Seen(name=name, logged_as=f"host:{name[-1]}", **seen_of) for name in names]
    store = RolloutStore(settings.querylog, "attached servers", RolloutParams())
    rows = store.tell(Joined(names=names), *looks).rows
    RolloutStore(settings.querylog, "target abc", RolloutParams()).tell(Joined(names=("host:8000/a",)))
    said = {"server": "host:1", "draft_version": 2, "drafted": [3, 3], "accepted": [3, 0]}
    other = [{"draft_version": 1}, {"server": "host:2"}, {"server": None}, {"accepted": [3, 3], "domain": "code"}]
    log = [row(f"a{at}").model_copy(update=said | one) for at, one in enumerate([{}, *other])]
    QueryLog(settings.querylog).append(log)
    seen = overview(settings)
    assert seen.attached == rows
    assert [row.name for row in seen.fleets["target abc"].rows] == ["host:8000/a"]
    taus = {domain: one.mean_accepted_length for domain, one in seen.acceptance["http://1"].items()}
    assert (seen.acceptance["http://0"], taus) == ({}, {"chat": 2.5, "code": 4.0})


def test_a_past_draft_that_was_tried_again_is_the_last_refresh(settings: Settings, checkpoint: Make) -> None:
    tags = draft_tags(parent="2", gate="refused", gated_against="1", gate_test="1", returns_for="chat")
    open_registry(settings).register("draft", checkpoint("draft 4"), tags)
    last = overview(settings).last_refresh
    assert last is not None
    assert (last.version, last.rows, last.returns) == (4, "", "draft 2 returns for chat")


def test_what_the_loop_waits_for_is_told(settings: Settings) -> None:
    assert overview(settings).waiting.what == "orchestrator"
    QueryLog(settings.querylog).append([row(f"a{number}", consent="metadata") for number in range(70)])
    look = LastLook(at_ms=now_ms(), min_rows=60, wanted={}, interval_s=60.0, interval_from_ms=now_ms())
    TriggerStore(settings.querylog).note(look)
    assert overview(settings).waiting.what == "consent"
