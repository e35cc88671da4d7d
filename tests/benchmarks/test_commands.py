"""Each benchmark on a tiny build, as a command: figures, report, picture, and a second run that only reads."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.registry import OWN_TAGS, Registry
from tests.flows.conftest import Cli

TIMEOUT_S = 1200  # each starts the service several times
pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * TIMEOUT_S)]


def run(cli: Cli, name: str, output: Path, *options: str) -> dict[str, Any]:
    """Run a benchmark twice and return its figures; the second run must find every cell."""
    arguments = ("bench", name, "--recipe", "tiny", "--output", str(output), *options)
    first = _last_object(cli.run(*arguments, timeout_s=TIMEOUT_S))
    before = _changed_at(output)
    assert _last_object(cli.run(*arguments, timeout_s=TIMEOUT_S)) == first
    assert _changed_at(output) == before
    assert json.loads((output / "result.json").read_text()) == first
    assert (output / "RESULTS.md").read_text().startswith("## ")
    return first


def _changed_at(output: Path) -> dict[Path, int]:
    """When cells, and what services were started with, were written last."""
    files = [*output.glob("cells/*.json"), *output.glob("home/service.json"), *output.glob("*/logs/*.log")]
    return {file: file.stat().st_mtime_ns for file in files}


def _last_object(output: str) -> dict[str, Any]:
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def with_a_second_draft(home: Path) -> None:
    """Make the champion's files a second version, as if a refresh had learnt nothing."""
    registry = Registry(f"sqlite:///{home / 'mlflow.db'}", home / "artifacts" / "mlflow")
    first = registry.champion("draft")
    assert first is not None
    tags = {name: value for name, value in first.tags.items() if name not in OWN_TAGS}
    copy = registry.register("draft", registry.download(first, home / "cache"), tags | {"parent": str(first.number)})
    registry.promote("draft", copy.number)


def test_speed_holds_every_side_to_the_target_alone_and_leaves_the_served_home_as_it_was(built, tmp_path):
    shutil.copytree(built[0].home, tmp_path / "served")
    with_a_second_draft(tmp_path / "served")
    cli = Cli(tmp_path / "served")
    with closing(sqlite3.connect(cli.home / "mlflow.db")) as db:
        before = list(db.iterdump())
    found = run(cli, "speed", tmp_path / "speed", "--prompts", "3", "--rounds", "1")
    sides = found["domains"]["chat"]
    assert sides.keys() == {
        "served pair",
        "served pair, speculation off",
        "first draft",
        "vLLM without a draft",
        "vLLM ngram",
        "transformers",
        "transformers, prompt lookup",
        "reference engine",
        "reference engine without a draft",
    }
    for side in sides.values():
        assert side["outputs"].get("different", 0) == 0
        assert side["num_prompts"] == 3
        assert side["tokens_per_s"]["median"] > 0
    assert sides["served pair"]["tau"] > 1
    assert sides["served pair, speculation off"]["tau"] == sides["reference engine without a draft"]["tau"] == 1
    assert sides["reference engine"]["tau"] > 1
    assert sides["reference engine without a draft"]["over_alone"]["overall"]["value"] > 0
    assert sides["vLLM without a draft"]["over_alone"]["overall"]["value"] == 1
    assert (tmp_path / "speed" / "speed.png").read_bytes().startswith(b"\x89PNG")
    with closing(sqlite3.connect(cli.home / "mlflow.db")) as db:
        assert list(db.iterdump()) == before


def test_swaps_under_load_fail_no_request_and_a_restart_is_an_outage(built, tmp_path):
    found = run(built[0], "swap", tmp_path / "swap", "--prompts", "4", "--swaps", "3", "--per-cell", "2")
    assert found["num_swaps"] == 3
    assert found["failed"] == {}
    assert found["outputs"].get("different", 0) == 0
    assert found["inter_token_ms"]["near a swap"]["count"] > 0
    assert found["restart"]["outage_s"] > 1 > found["inter_token_ms"]["near a swap"]["p99"] / 1000
    assert (tmp_path / "swap" / "swap.png").read_bytes().startswith(b"\x89PNG")


def test_every_logged_request_is_a_row(built, tmp_path):
    options = ("--prompts", "4", "--rounds", "2", "--concurrency", "4", "--rows", "500")
    found = run(built[0], "logging", tmp_path / "logging", *options)
    for streams in ("1", "4"):
        one = found["streams"][streams]
        assert (one["written"], one["dropped"]) == (one["expected"], 0) == (16, 0)
        assert one["latency_ratio"]["overall"]["value"] > 0
    assert found["rate"]["rows_per_s"] > 0
    assert found["rate"]["lost"] == 0


def test_a_refresh_trains_beside_the_load_and_its_draft_is_not_served(built, tmp_path):
    options = ("--prompts", "4", "--rounds", "1", "--pause", "0.1", "--quiet", "5")
    found = run(built[0], "trainer", tmp_path / "trainer", *options)
    assert found["failed"] == {}
    assert found["outputs"].get("different", 0) == 0
    assert found["outcomes"][0].startswith(("promoted", "refused"))
    assert found["trainers"][0]["tokens_per_s"] > 0
    for kind in ("no refresh", "a refresh trains"):
        assert found["kinds"][kind]["inter_token_ms"]["p99"] > 0
    served = json.loads((tmp_path / "trainer" / "home" / "service-state.json").read_text())
    assert [version["number"] for version in served["good"]] == [1]


def test_the_demonstration_is_timed_from_nothing_and_once_more(cli_in, tmp_path):
    found = run(cli_in(tmp_path / "home"), "demo", tmp_path / "demo")
    first, second = found["first"], found["second"]
    assert first["stages"]["build"] > second["stages"]["build"]
    assert first["wall_s"] > second["wall_s"]
    assert set(first["requests"]) == {"ok"}
    assert not (tmp_path / "home").joinpath("mlflow.db").exists()


def test_the_gates_error_and_power_are_simulated(built, tmp_path):
    found = run(built[0], "gate", tmp_path / "gate", "--runs", "40", "--windows", "12")
    assert found["failures"] == []
    assert found["cases"]["20% better"]["median_window"] == 1
    assert (
        found["former"]["no gain, clusters of 30"]["promoted"] > found["cases"]["no gain, clusters of 30"]["promoted"]
    )
    assert (tmp_path / "gate" / "gate.png").read_bytes().startswith(b"\x89PNG")
