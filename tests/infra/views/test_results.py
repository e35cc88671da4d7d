"""The block of Markdown, and the JSON line."""

import json

from infra.views import results
from infra.views.results import Grid, Report, interval, publish, spread, working

SETUP = {
    "commit": "0123456789abcdef",
    "device": {"processor": "x86", "cores": 2, "dtype": "float32", "versions": {"torch": "2.13.0"}},
}


def test_the_block_holds_what_a_reader_needs_and_the_last_line_is_one_json_object_also_on_disk(tmp_path, capsys):
    report = Report(
        figures={"ratio": 1.5},
        grids=[Grid("speeds", ["side", "tokens/s"], [["pair", "90.0"], ["alone", "60.0"]])],
        notes=["One stream."],
        failures=["2 outputs differ"],
    )
    result = publish(report, tmp_path, "B1", "is it faster?", "redraft bench speed", SETUP)
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert lines[0].endswith(": is it faster? (B1)")
    assert lines[2] == "`redraft bench speed`, commit 0123456, x86, 2 cores, float32, torch 2.13.0."
    assert lines[6:10] == ["| side | tokens/s |", "| --- | --- |", "| pair | 90.0 |", "| alone | 60.0 |"]
    assert lines[11:13] == ["One stream.", "Failed: 2 outputs differ."]

    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    assert json.loads((tmp_path / "result.json").read_text()) == result
    assert (result["benchmark"], result["ratio"], result["commit"]) == ("B1", 1.5, SETUP["commit"])


def test_figures_come_with_what_they_spread_over():
    assert spread({"median": 2.04, "p10": 1.0, "p90": 3.0}) == "2.0 (1.0 to 3.0)"
    assert interval({"value": 1.234, "low": 1.0, "high": 1.5}) == "1.23 (1.00 to 1.50)"


def test_without_a_terminal_what_is_being_done_is_said_in_lines_now_and_then(capsys, monkeypatch):
    with working("starting [all]") as tell:
        tell("starting [all] (1 s)")
        monkeypatch.setattr(results, "LINE_S", 0.0)
        tell("starting [all] (31 s)")
    assert capsys.readouterr().out.splitlines() == ["starting [all]", "starting [all] (31 s)"]
