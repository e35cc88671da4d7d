"""Each benchmark on a tiny build, as a command: figures, report, picture, and a second run that only reads."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from infra.machine import suffix_version
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings
from infra.versions import OWN_TAGS
from tasks.measure.drift import FROZEN, ONLINE, OURS, POOL, SCRATCH
from tasks.measure.stock import BY_BATCH_SIZE
from tests.benchmarks import falls, gate, rollback_delay
from tests.flows.conftest import Cli

TIMEOUT_S = 1200  # each starts the service several times
pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * TIMEOUT_S)]


def run(cli: Cli, name: str, output: Path, *options: str) -> dict[str, Any]:
    """Run a benchmark of the command line twice and return its figures."""
    first = _twice(cli, "flows.cli", output, "bench", name, *options)
    assert json.loads((output / "result.json").read_text()) == first
    assert (output / "report.md").read_text().startswith("## ")
    return first


def run_script(cli: Cli, name: str, output: Path, *options: str) -> dict[str, Any]:
    """Run a script twice and return its figures."""
    return _twice(cli, f"tests.benchmarks.{name}", output, *options)


def _twice(cli: Cli, program: str, output: Path, *options: str) -> dict[str, Any]:
    """Return the figures of a program; the second run must find every cell."""
    arguments = (*options, "--recipe", "tiny", "--output", str(output))
    first = _last_object(cli.run(*arguments, timeout_s=TIMEOUT_S, program=program))
    before = _changed_at(output)
    assert _last_object(cli.run(*arguments, timeout_s=TIMEOUT_S, program=program)) == first
    assert _changed_at(output) == before
    return first


def _changed_at(output: Path) -> dict[Path, int]:
    """When cells, and what services were started with, were written last."""
    files = [*output.glob("cells/*.json"), *output.glob("home/service.json"), *output.glob("*/logs/*.log")]
    return {file: file.stat().st_mtime_ns for file in files}


def _last_object(output: str) -> dict[str, Any]:
    return json.loads([line for line in output.splitlines() if line.startswith("{")][-1])


def with_a_second_draft(home: Path) -> None:
    """Make the champion's files a second version, as if a refresh had learnt nothing."""
    registry = open_registry(Settings(home=home))
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
        "vLLM",
        "vLLM with ngram",
        "vLLM with the first draft",
        "vLLM with the served draft",
        *([] if suffix_version() is None else ["vLLM with suffix"]),
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
    assert sides["vLLM with the served draft"]["tau"] > 1
    assert sides["reference engine without a draft"]["over_stock"]["overall"]["value"] > 0
    assert sides["vLLM"]["over_stock"]["overall"]["value"] == 1
    assert sides["vLLM"]["tau"] is None
    assert sides["vLLM"]["first_token_ms"]["median"] > 0
    assert (tmp_path / "speed" / "speed.png").read_bytes().startswith(b"\x89PNG")
    with closing(sqlite3.connect(cli.home / "mlflow.db")) as db:
        assert list(db.iterdump()) == before


def test_speculation_is_held_to_none_at_each_load_with_a_bad_and_a_good_draft(built, tmp_path):
    options = ("--prompts", "4", "--streams", "1", "--streams", "3", "--pairs", "2", "--baseline", "vLLM")
    found = run(built[0], "load", tmp_path / "load", *options, "--baseline", BY_BATCH_SIZE)
    assert found["outputs"].get("different", 0) == 0
    assert sum(found["outputs"].values()) == 2 * 2 * 2 * 2 * (4 + 6)  # domains, drafts, ways, pairs, prompts of blocks
    for sides in found["domains"].values():
        # there is one draft, so the first is the champion
        assert sides.keys() == {"bad", "champion", "vLLM", BY_BATCH_SIZE}
        for streams in ("1", "3"):
            assert sides["champion"][streams]["ratio"]["value"] > 0
            assert sides["vLLM"][streams].keys() == {"off"}
            assert sides[BY_BATCH_SIZE][streams]["off"] == sides["vLLM"][streams]["off"]
            assert sides[BY_BATCH_SIZE][streams]["ratio"]["value"] > 0
    assert (tmp_path / "load" / "load.png").read_bytes().startswith(b"\x89PNG")
    keys = json.loads((tmp_path / "load" / "home" / "keys.json").read_text())["keys"]
    of_blocks = {key["sha256"] for key in keys if key["name"].startswith("bench-")}
    assert len(of_blocks) == 2 * 2 * 2 * 2 * 2  # domains, drafts, ways, pairs, numbers of streams


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
    found = run_script(built[0], "query_log", tmp_path / "query_log", *options)
    for streams, expected in (("1", 16), ("4", 64)):
        one = found["streams"][streams]
        assert (one["written"], one["dropped"], one["expected"]) == (expected, 0, expected)
        assert one["latency_ratio"]["value"] > 0
    assert found["rate"]["rows_per_s"] > 0
    assert found["rate"]["lost"] == 0


def test_a_refresh_trains_beside_the_load_and_its_draft_is_not_served(built, tmp_path):
    options = ("--prompts", "4", "--rounds", "1", "--pause", "0.1", "--quiet", "5")
    found = run_script(built[0], "trainer", tmp_path / "trainer", *options)
    assert sum(found["outputs"].values()) > 0
    assert found["outcomes"][0].startswith(("promoted", "refused"))
    assert found["trainers"][0]["tokens_per_s"] > 0
    for kind in ("no refresh", "a refresh trains"):
        assert found["kinds"][kind]["inter_token_ms"]["p99"] > 0
    served = json.loads((tmp_path / "trainer" / "home" / "service-state.json").read_text())
    assert [version["number"] for version in served["good"]] == [1]


def test_the_demonstration_is_timed_from_nothing_and_once_more(cli_in, tmp_path):
    found = run_script(cli_in(tmp_path / "home"), "demo", tmp_path / "demo")
    first, second = found["first"], found["second"]
    assert first["stages"]["build"] > second["stages"]["build"]
    assert first["wall_s"] > second["wall_s"]
    assert set(first["requests"]) == {"ok"}
    assert not (tmp_path / "home").joinpath("mlflow.db").exists()


def test_what_is_simulated_needs_no_home(capsys, monkeypatch):
    found = {}
    for script in (gate, falls, rollback_delay):
        options = ["--runs", "4", *(["--windows", "4"] if script is gate else [])]
        monkeypatch.setattr("sys.argv", [script.__name__, *options])
        script.main()
        found |= _last_object(capsys.readouterr().out)
    assert found["cases"]["20% better"]["median_window"] == 1
    assert found["falls"]["chat: 90% lost"]["told"] == 1
    assert found["taken_back"]["worse by 20%"]["within"] == 1


@pytest.fixture
def served(built, rows, tmp_path) -> Cli:
    """Return a home with a log."""
    home = tmp_path / "served"
    shutil.copytree(built[0].home, home)
    log = QueryLog(home / "queries.db")
    log.append(rows)
    log.close()
    return Cli(home)


@pytest.fixture
def sums(tmp_path) -> str:
    """Return a file of questions, as an option names it."""
    questions = [{"messages": [{"role": "user", "content": f"What is {n} and {n}?"}]} for n in range(300)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return f"sums={tmp_path / 'sums.jsonl'}"


def test_the_gains_interval_is_held_to_fresh_requests(served, tmp_path):
    found = run_script(served, "coverage", tmp_path / "coverage", "--splits", "5", "--prompts", "30")
    assert found["num_logged"] == 120
    assert found["num_fresh"] == 30
    for side in (found["own"], found["logs"]):
        assert side["covered"] + side["too_high"] + side["too_low"] == 5
        assert 12 <= side["conversations"] < 120


def test_refreshes_go_on_where_the_log_stands_and_take_both_keys_and_a_further_domain(served, sums, tmp_path):
    options = ("--refreshes", "1", "--requests", "12", "--prompts", "6", "--data", sums)
    found = run_script(served, "refreshes", tmp_path / "refreshes", *options)
    assert found["domains"].keys() == {"chat", "code", "sums"}
    assert found["refreshes"][0]["gate"]["test"]["rows"] == [1, 120 + 3 * 12]
    rows = QueryLog(tmp_path / "refreshes" / "home" / "queries.db").rows(121, 1000)
    assert len({row.key for row in rows}) == 2


def test_drafts_learn_from_more_and_more_requests_of_a_domain_and_of_a_file(built, sums, tmp_path):
    options = ("--size", "4", "16", "--first", "8", "--seeds", "2", "--prompts", "6")
    found = run_script(built[0], "learning", tmp_path / "learning", *options)
    assert found["domains"] == {"refresh": "code", "first draft": "chat"}
    assert [(row["size"], row["num_seeds"]) for row in found["curves"]["refresh"]] == [(4, 2), (16, 2)]
    for row in [*found["curves"]["refresh"], *found["curves"]["first draft"]]:
        assert row["train_s"] > 0
        assert len(row["acceptance"]["5"]["per_position"]) == 5
    options = ("--size", "4", "--first", "0", "--seeds", "1", "--prompts", "6", "--data", sums)
    assert run_script(built[0], "learning", tmp_path / "file", *options)["domains"]["refresh"] == "sums"


def test_a_refresh_learns_what_was_served_and_answers_given_again(built, tmp_path):
    options = ("--requests", "8", "--served", "6", "--anew", "1", "2", "--prompts", "6", "--seeds", "2")
    found = run_script(built[0], "regeneration", tmp_path / "regeneration", *options)
    assert found["domain"] == "code" and len(found["arms"]) == 5
    for arm in found["arms"].values():
        assert arm.keys() == {"6", "100"} and arm["6"]["tau"] >= 1


def test_every_way_to_follow_a_shift_is_held_to_the_specialist(served, sums, tmp_path):
    options = ("--requests", "16", "--windows", "2", "--prompts", "6", "--data", sums)
    found = run(served, "drift", tmp_path / "drift", *options)
    assert (found["shifted"], found["known"]) == ("sums", "code")
    assert found["ways"].keys() == {FROZEN, OURS, ONLINE, SCRATCH, POOL}
    for way in found["ways"].values():
        assert way["changes"].keys() == {"chat", "code"}
        assert way["back"]["value"] >= 1
    assert (tmp_path / "drift" / "drift.png").read_bytes().startswith(b"\x89PNG")


def test_without_questions_the_recipes_held_out_prompts_are_asked(built, tmp_path):
    ways = tmp_path / "ways.toml"
    ways.write_text('[suffix]\ndraft = { name = "suffix" }\n')
    options = ("--per-task", "2", "--max-tokens", "8", "--configurations", str(ways))
    found = run(built[0], "specbench", tmp_path / "specbench", *options)
    assert list(found["temperatures"]["0"]["tasks"]) == ["chat", "code", "all tasks"]
    assert found["temperatures"]["0"]["tasks"]["code"]["suffix"]["num_prompts"] == 2


def test_ways_of_drafting_are_held_to_plain_decoding_task_by_task(built, tmp_path):
    questions = [
        {"id": f"{task}{number}", "domain": task, "messages": [{"role": "user", "content": f"{task} {number}"}]}
        for task in ("qa", "math")
        for number in range(3)
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    options = ("--data", str(data), "--per-task", "2", "--per-cell", "1", "--max-tokens", "8", "--temperature", "0")
    ways = tmp_path / "ways.toml"
    ways.write_text('[lm]\ndraft = { name = "lm", num_layers = 1 }\n[suffix]\ndraft = { name = "suffix" }\n')
    options = (*options, "--temperature", "1", "--train", "0.05", "--configurations", str(ways))
    found = run(built[0], "specbench", tmp_path / "specbench", *options)
    for tasks in (found["temperatures"][at]["tasks"] for at in ("0", "1")):
        assert list(tasks) == ["qa", "math", "all tasks"]
        assert {way: of["num_prompts"] for way, of in tasks["all tasks"].items() if way != "plain decoding"} == {
            "lm": 4,
            "suffix": 4,
        }
    assert found["failures"] == []
    assert (tmp_path / "specbench" / "specbench.png").is_file()
