"""`redraft compare` from end to end with a comparison of its own: real target, real text, cells, table, run, JSON."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows import cli
from infra.home import open_home
from infra.settings import load_settings
from models.recipe import shipped_recipes
from tasks.measure import comparisons
from tests.flows.conftest import registry_of

pytestmark = pytest.mark.slow

# How much of the text a unigram model of the training part explains; a row that names a file is interrupted by it.
SOURCE = '''
"""Unigrams against a uniform guess."""

import math
from collections import Counter
from pathlib import Path

from tasks.measure.comparisons import Row

QUESTION = "how much do token counts know?"
BASELINE = "uniform"
COLUMNS = {"loss": "nats a token, lower is better", "counted": "tokens counted"}


def rows(budget):
    noisy = [Row("noisy", {}), Row("same", {})] if budget == 3 else []
    swept = [Row("swept", {"learning_rate": 0.5})] if budget == 4 else []
    return [Row("uniform", {}), Row("unigram", {"smoothing": 1.0}), *noisy, *swept]


def tune(bench, row, seed):
    with Path("MEASURED").open("a") as file:
        print("sweep", row.settings["learning_rate"], file=file)
    return abs(row.settings["learning_rate"] - 2)


def measure(bench, row, seed):
    with Path("MEASURED").open("a") as file:
        print(row.name, seed, file=file)
    if Path("INTERRUPT").exists() and (row.name, seed) == ("unigram", 1):
        raise KeyboardInterrupt
    assert bench.target_dir.joinpath("config.json").is_file() and list(bench.work_dir.iterdir()) == []
    held_out = [token for document in bench.held_out["code"] for token in document]
    if row.name == "swept":
        return {"loss": row.settings["learning_rate"], "counted": float("nan")}
    if row.name == "noisy":
        return {"loss": math.log(259) + (-1) ** seed, "counted": float("nan")}
    if row.name in ("uniform", "same"):
        return {"loss": math.log(259), "counted": float("nan")}
    documents = bench.train["code"]
    counted = Counter(token for document in documents[seed : seed + round(8 * bench.budget)] for token in document)
    total = sum(counted.values()) + 259 * row.settings["smoothing"]
    nats = -sum(math.log((counted[token] + row.settings["smoothing"]) / total) for token in held_out)
    return {"loss": nats / len(held_out), "counted": float(sum(counted.values()))}
'''


@pytest.fixture
def run(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_environment: None
) -> Iterator[Callable[..., Result]]:
    """Return what runs `redraft compare` in a fresh home, with one more file among the comparisons."""
    (tmp_path / "files").mkdir()
    source = SOURCE.replace("MEASURED", str(tmp_path / "measured")).replace("INTERRUPT", str(tmp_path / "interrupt"))
    (tmp_path / "files" / "unigrams.py").write_text(source)
    monkeypatch.setattr(comparisons, "__path__", [*comparisons.__path__, str(tmp_path / "files")])
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    open_home(load_settings())
    shutil.copy(store, tmp_path / "home")
    yield lambda *arguments: CliRunner().invoke(cli.app, ["compare", *arguments, "--recipe", "tiny"])
    sys.modules.pop("tasks.measure.comparisons.unigrams", None)


def told(result: Result) -> dict[str, Any]:
    """Return what a comparison that succeeded printed at its end."""
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def measured(tmp_path: Path) -> list[str]:
    return (tmp_path / "measured").read_text().splitlines()


def test_an_interrupted_comparison_goes_on_with_what_is_missing_and_reports_all_of_it(run, tmp_path: Path) -> None:
    (tmp_path / "interrupt").touch()
    stopped = run("unigrams")
    assert stopped.exit_code == 130, stopped.output
    assert measured(tmp_path) == ["uniform 0", "unigram 0", "uniform 1", "unigram 1"]
    (tmp_path / "interrupt").unlink()
    found = told(run("unigrams"))
    assert measured(tmp_path)[4:] == ["unigram 1", "uniform 2", "unigram 2"]

    folder = tmp_path / "home" / "compare" / "unigrams-tiny"
    assert json.loads((folder / "result.json").read_text()) == found
    assert (found["benchmark"], found["num_seeds"], found["recipe"]["name"]) == ("compare unigrams", 3, "tiny")
    assert found["commit"] and found["device"]["versions"]["torch"]
    rows = found["rows_measured"]
    assert rows["uniform"]["counted"]["value"] is None
    assert rows["unigram"]["loss"]["value"] < rows["uniform"]["loss"]["value"] - 1
    gain = rows["unigram"]["loss"]["gain"]
    assert gain["low"] < gain["value"] < gain["high"] < 0
    block = (folder / "report.md").read_text()
    assert "how much do token counts know? (compare unigrams)" in block
    assert "| uniform | 5.557 | – |" in block
    assert re.search(r"^\| unigram \| .*\)\* \|", block, re.MULTILINE)
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")

    [metrics] = registry_of(tmp_path / "home").store.recorded("compare unigrams: unigram")
    assert metrics["loss"] == pytest.approx(rows["unigram"]["loss"]["value"])
    assert metrics["loss/gain"] == pytest.approx(gain["value"])

    assert told(run("unigrams")) == found  # nothing is measured and no run is recorded once more
    assert len(measured(tmp_path)) == 7
    assert len(registry_of(tmp_path / "home").store.recorded("compare unigrams: unigram")) == 1


@pytest.mark.parametrize("family", ["all", "trees"])
def test_rows_that_are_timed_are_not_measured_at_once(run, family: str) -> None:
    refused = run(family, "--jobs", "2")
    assert refused.exit_code == 2
    assert f"--jobs: rows of {family} are told apart by what they take; wanted 1, got 2" in refused.output


def test_an_interrupt_ends_what_is_measured_at_once_and_its_cells_are_those_of_one_after_the_other(
    run, tmp_path: Path
) -> None:
    asked = ["verify", "--budget", "0.1", "--only", "spectr, 2*"]
    environment = {**os.environ, "REDRAFT_HOME": str(tmp_path / "home")}
    # A shell that runs tests in its background has them ignore the signal, and so what they start.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "flows.cli", "compare", *asked, "--recipe", "tiny"]
    command += ["--seeds", "400", "--jobs", "2"]
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    cells = tmp_path / "home" / "compare" / "verify-tiny" / "cells"
    until = time.monotonic() + 240
    while len(finished := list(cells.glob("*-seed-[01].json"))) < 6 and time.monotonic() < until:
        time.sleep(0.2)
    children = psutil.Process(running.pid).children(recursive=True)
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 130
    assert len(finished) == 6 and len(children) >= 2
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert all(json.loads(one.read_text())["metrics"] for one in cells.glob("*-seed-*.json"))

    kept = told(run(*asked, "--seeds", "2", "--jobs", "2"))
    measured_now = told(run(*asked, "--seeds", "2", "--jobs", "1", "--output", str(tmp_path / "alone")))
    assert [one["jobs"] for one in (kept, measured_now)] == [2, 1]
    alone, together = (one["rows_measured"] for one in (measured_now, kept))
    assert len(alone) == 3
    for row, figures in alone.items():  # another number of threads rounds otherwise
        assert together[row]["kept_pct"]["value"] == pytest.approx(figures["kept_pct"]["value"], rel=1e-3)


def test_fewer_than_three_seeds_are_taken_and_said(run, tmp_path: Path) -> None:
    one = run("unigrams", "--seeds", "1", "--output", str(tmp_path / "mine"))
    assert told(one)["rows_measured"]["unigram"]["loss"]["interval"] is None
    assert "1 of at least 3 seeds" in one.output
    assert (tmp_path / "mine" / "report.md").is_file()
    other = run("unigrams", "--seeds", "1", "--budget", "2", "--output", str(tmp_path / "mine"))
    assert other.exit_code == 2
    assert "measured with another budget" in other.stderr


def test_under_a_margin_undecided_rows_get_more_seeds_and_what_is_still_open_is_told(run, tmp_path: Path) -> None:
    found = told(run("unigrams", "--margin", "loss 0.1", "--seeds", "2", "--max-seeds", "4", "--budget", "3"))
    verdicts = found["verdicts"]
    # Uniform is compared with, unigrams differ and equal guesses are level after two seeds; noise goes on to four.
    assert measured(tmp_path) == [
        *[f"{row} {seed}" for seed in (0, 1) for row in ("uniform", "unigram", "noisy", "same")],
        *[f"{row} {seed}" for seed in (2, 3) for row in ("uniform", "noisy")],
    ]
    assert (verdicts["unigram"], verdicts["same"]) == ("differs", "level")
    assert re.fullmatch(r"undecided, needs about \d+ more seeds?", verdicts["noisy"])
    block = (tmp_path / "home" / "compare" / "unigrams-tiny" / "report.md").read_text()
    assert "Within 0.1 of nats a token, lower is better, at 95% over all looks: " in block


def test_a_row_is_measured_at_the_learning_rate_that_its_sweep_finds_once_for_all_seeds(run, tmp_path: Path) -> None:
    found = told(run("unigrams", "--seeds", "2", "--budget", "4", "--only", "swept"))
    sweep = [f"sweep {rate}" for rate in (0.5, 0.167, 1.5, 4.5)]
    assert measured(tmp_path) == ["uniform 0", *sweep, "swept 0", "uniform 1", "swept 1"]
    assert found["rows_measured"]["swept"]["loss"]["value"] == 1.5
    assert found["sweep"]["most_runs"] == 5


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--margin", "los 0.1"], '--margin: no column "los" (did you mean "loss"?)'),
        (["--margin", "loss"], "--margin: wanted a column's name and a number above 0"),
        (["--max-seeds", "4"], "--max-seeds 4 is for rows under a --margin, and none is given"),
        (["--fit", "110 MiB"], '--fit chooses a target to serve, of "redraft compare all"'),
    ],
)
def test_a_slip_in_an_option_is_told_before_anything_is_measured(run, tmp_path: Path, options, fault: str) -> None:
    result = run("unigrams", *options)
    assert result.exit_code == 2 and fault in result.stderr
    assert not (tmp_path / "measured").exists()


def test_an_unknown_family_is_answered_with_the_nearest_one(run) -> None:
    result = run("unigram")
    assert result.exit_code == 2
    assert 'no family to compare is called "unigram" (did you mean "unigrams"?)' in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_recipe_without_text_is_refused(run, tmp_path: Path) -> None:
    recipe = tmp_path / "bare.toml"
    text = shipped_recipes()["tiny"].read_text()
    recipe.write_text(text[: text.index("[text.code]")] + text[text.index("[traffic.chat]") :])
    result = CliRunner().invoke(cli.app, ["compare", "unigrams", "--recipe", str(recipe)])
    assert result.exit_code == 2
    assert "recipe bare has no [text.DOMAIN] table" in result.stderr
