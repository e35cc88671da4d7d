"""The command line: help, exit codes and messages."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows import cli
from infra.keys import read_keys

COMMANDS = (
    "build", "serve", "refresh", "traffic", "promote", "rollback", "diff", "status", "report", "demo", "doctor",
    "import-draft", "import-logs", "compare", "erase", "retain", "backup", "restore", "clean",
)  # fmt: skip
PANELS = ("Every day", "Drafts", "Privacy", "Home", "Measure", "Keys")


def commands() -> Iterator[tuple[list[str], click.Command]]:
    """Yield each command with the words that name it."""
    for name, command in get_command(cli.app).commands.items():
        if name in ("bench", "keys"):
            yield from (([name, inner], benchmark) for inner, benchmark in command.commands.items())
        else:
            yield [name], command


@pytest.fixture
def run(tmp_path, monkeypatch, own_environment):
    """Return what runs a command in a fresh home."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    return lambda *arguments: CliRunner().invoke(cli.app, arguments)


def test_help_names_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for name in COMMANDS:
        assert name in result.output


def test_help_groups_the_commands_and_each_has_an_example_that_parses(run):
    shown = run("--help").output
    assert shown.count("redraft build --recipe tiny") == shown.count("redraft promote 3") == 1
    assert [shown.index(panel) for panel in PANELS] == sorted(shown.index(panel) for panel in PANELS)
    for path, command in commands():
        assert command.rich_help_panel in PANELS or path[0] == "bench", path
        _, found, example = command.help.partition("Example: redraft ")
        assert found, f"the help of {' '.join(path)} has no example"
        arguments = shlex.split(example.strip())
        assert arguments[: len(path)] == path
        command.make_context("redraft", arguments[len(path) :])


def test_help_names_the_table_of_a_recipe_in_its_brackets(run):
    for command, table in (("retain", "[schedule]"), ("clean", "[keep]")):
        assert table in run("--help").output
        assert table in run(command, "--help").output


@pytest.mark.slow
def test_a_command_ends_without_a_last_search_for_garbage():
    code = (
        "import atexit, gc, sys; from flows.cli import main; sys.argv = ['redraft', '--help']; "
        "atexit.register(lambda: print('left alone:', gc.get_freeze_count() > 0)); main()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("left alone: True\n")


def test_help_names_every_benchmark(run):
    result = run("bench", "--help")
    assert result.exit_code == 0
    for name in ("speed", "load", "swap", "drift", "specbench"):
        assert name in result.output


@pytest.mark.slow
def test_keys_are_made_listed_and_revoked_and_shown_once(run, tmp_path):
    made = run("keys", "add", "team-one", "--log", "metadata").stdout.strip()
    assert run("keys", "add", "prometheus", "--role", "scraper").exit_code == 0
    shown = run("keys", "list").output
    assert all(word in shown for word in ("team-one", "client", "metadata", "prometheus", "scraper"))
    assert made not in shown
    assert run("keys", "revoke", "team-one").exit_code == 0
    assert [key.accepted for key in read_keys(tmp_path / "home" / "keys.json")] == [False, True]
    for wrong in (
        ("revoke", "team-one"),
        ("add", "prometheus"),
        ("add", "x", "--role", "root"),
        ("add", "x", "--log", "all"),
    ):
        result = run("keys", *wrong)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_f42_a_setting_that_can_not_be_is_refused_in_a_line_that_names_it_before_anything_starts(
    run, tmp_path, monkeypatch, command
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        recipe = tmp_path / "mine.toml"
        shipped = (Path(cli.__file__).parents[1] / "models" / "recipes" / "tiny.toml").read_text()
        recipe.write_text(shipped.replace("port = 0", f"port = {taken.getsockname()[1]}"))
        busy = run(command, "--recipe", str(recipe))
    monkeypatch.setenv("REDRAFT_API_KEYS", "secret!")
    short = run(command, "--recipe", "tiny")
    monkeypatch.delenv("REDRAFT_API_KEYS")
    monkeypatch.setenv("REDRAFT_HOST", "0.0.0.0")
    strange = run(command, "--recipe", "tiny")
    for result, named in ((busy, "[serve] port"), (short, "REDRAFT_API_KEYS"), (strange, "REDRAFT_HOST")):
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith(f"redraft: {named}")
        assert "secret!" not in result.output
    assert not [file for file in (tmp_path / "home").rglob("*") if file.suffix == ".log" or file.name == "service.json"]


def test_a_misspelt_key_is_one_line_and_exit_code_2(run, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[refresh]\nmin_rowz = 3\n")
    result = run("build", "--recipe", str(recipe))
    assert result.exit_code == 2
    assert result.stderr.startswith(
        'redraft: mine.toml: [refresh]: refresh: unknown key "min_rowz" (did you mean "min_rows"?)'
    )
    assert result.stderr.count("\n") == 1


def test_an_unknown_method_is_answered_with_the_nearest_one(run, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[target]\nname = "smolm2"\n')
    result = run("build", "--recipe", str(recipe))
    assert result.exit_code == 2
    assert 'no method "smolm2" in targets (did you mean "smollm2"?)' in result.stderr


def test_an_unknown_recipe_is_exit_code_2(run):
    result = run("refresh", "--recipe", "tinny")
    assert result.exit_code == 2
    assert 'did you mean "tiny"' in result.stderr


def test_a_misspelt_setting_is_exit_code_2(run, monkeypatch):
    monkeypatch.setenv("REDRAFT_HOMES", "x")
    result = run("doctor")
    assert result.exit_code == 2
    assert "REDRAFT_HOMES is not a setting; did you mean REDRAFT_HOME?" in result.stderr


def test_an_unknown_domain_of_traffic_is_exit_code_2(run):
    result = run("traffic", "--recipe", "tiny", "--domain", "cod")
    assert result.exit_code == 2
    assert 'has no domain "cod"; there are: chat, code' in result.stderr


def test_traffic_without_a_service_says_how_to_start_one(run):
    result = run("traffic", "--recipe", "tiny")
    assert result.exit_code == 2
    assert "no service was started yet; run: redraft serve" in result.stderr


def test_a_draft_that_is_not_there_is_refused_before_a_flow_starts(run, tmp_path):
    result = run("import-draft", str(tmp_path / "none"), "--recipe", "tiny")
    assert result.exit_code == 2
    assert result.stderr == f"redraft: there is no folder {tmp_path / 'none'}\n"


@pytest.mark.slow
def test_a_refresh_before_a_build_is_one_line_and_exit_code_2(run):
    result = run("refresh", "--recipe", "tiny")
    assert result.exit_code == 2
    assert result.stderr == "redraft: the registry has no champion target and draft yet; run: redraft build\n"


@pytest.mark.slow
def test_logs_are_not_imported_before_there_is_a_target(run, tmp_path):
    (tmp_path / "old.jsonl").write_text("{}\n")
    result = run("import-logs", str(tmp_path / "old.jsonl"), "--recipe", "tiny")
    assert result.exit_code == 2
    assert "no champion target yet" in result.stderr
    result = run("import-logs", str(tmp_path / "old.txt"), "--recipe", "tiny")
    assert result.exit_code == 2
    assert "old.txt: wanted a file ending in .jsonl, .json, .csv, .parquet" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(("promote", "7"), "draft 7"), (("rollback",), "there is no champion"), (("diff", "1", "2"), "draft 1")],
)
def test_a_version_that_is_not_there_is_exit_code_2(run, arguments, reason):
    result = run(*arguments)
    assert result.exit_code == 2
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_report_that_can_not_be_written_is_exit_code_2(run, tmp_path):
    result = run("report", "--output", str(tmp_path / "none" / "page.html"))
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


@pytest.mark.slow
def test_a_report_of_nothing_is_a_page(run, tmp_path):
    result = run("report", "--output", str(tmp_path / "page.html"))
    assert result.exit_code == 0
    assert str(tmp_path / "page.html") in result.output.replace("\n", "")
    assert "redraft build" in (tmp_path / "page.html").read_text()


def test_ctrl_c_is_exit_code_130(run, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_settings", interrupted)
    assert run("doctor").exit_code == 130
