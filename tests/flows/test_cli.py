"""The command line: help, exit codes and messages."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows import cli
from infra.keys import read_keys
from models.recipe import changed_tables, load_recipe, parse_recipe
from tests.models.families import write_family

PANELS = ("Every day", "Drafts", "Privacy", "Home", "Measure", "Keys")


def slow(command: str, told: str):
    return pytest.param(command, told, marks=pytest.mark.slow)


def shipped(recipe: str) -> str:
    return (Path(cli.__file__).parents[1] / "models" / "recipes" / f"{recipe}.toml").read_text()


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


@pytest.mark.slow
def test_up_in_the_foreground_says_what_is_missing_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "flows.cli", "up", "--foreground", "--recipe", "tiny"]
    done = subprocess.run(command, env=os.environ | {"REDRAFT_HOME": str(tmp_path)}, capture_output=True, check=False)
    missing = b"redraft: the registry has no champion target and draft yet; run: redraft build --recipe FILE\n"
    assert (done.returncode, done.stderr) == (2, missing), done.stdout
    assert not (tmp_path / "logs").exists()


def test_help_groups_the_commands_and_each_has_an_example_that_parses(run):
    shown = run("--help").output
    assert shown.count("redraft build --recipe tiny") == shown.count("redraft promote 3") == 1
    assert [shown.index(panel) for panel in PANELS] == sorted(shown.index(panel) for panel in PANELS)
    groups = {group: run(group, "--help").output for group in ("bench", "keys")}
    for path, command in commands():
        assert path[-1] in groups.get(path[0], shown)
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


@pytest.mark.slow
def test_keys_are_made_listed_and_revoked_and_shown_once(run, tmp_path):
    made = run("keys", "add", "team-one", "--log", "metadata").stdout.strip()
    assert run("keys", "add", "prometheus", "--role", "scraper").exit_code == 0
    shown = run("keys", "list").output
    assert all(word in shown for word in ("team-one", "client", "metadata", "prometheus", "scraper"))
    assert made not in shown
    assert run("keys", "revoke", "team-one").exit_code == 0
    assert [key.accepted for key in read_keys(tmp_path / "home" / "keys.json")] == [False, True]
    for wrong in ("revoke team-one", "add prometheus", "add x --role root", "add x --log all"):
        result = run("keys", *wrong.split())
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_f42_a_setting_that_can_not_be_is_refused_in_a_line_that_names_it_before_anything_starts(
    run, tmp_path, monkeypatch, command
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        recipe = tmp_path / "mine.toml"
        recipe.write_text(shipped("tiny").replace("port = 0", f"port = {taken.getsockname()[1]}"))
        found = {"[serve] port": run(command, "--recipe", str(recipe))}
    for name, value in (("REDRAFT_API_KEYS", "secret!"), ("REDRAFT_HOST", "0.0.0.0")):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            found[name] = run(command, "--recipe", "tiny")
    for named, result in found.items():
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith(f"redraft: {named}")
        assert "secret!" not in result.output
    assert not [file for file in (tmp_path / "home").rglob("*") if file.suffix == ".log" or file.name == "service.json"]


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("build --recipe key.toml", 'redraft: key.toml: unknown key "refresh.min_rowz" (did you mean "min_rows"?)'),
        ("build --recipe method.toml", 'no method "smolm2" in targets (did you mean "smollm2"?)'),
        ("refresh --recipe tinny", 'did you mean "tiny"'),
        ("traffic --recipe tiny --domain cod", 'has no domain "cod"; there are: chat, code'),
        ("traffic --recipe tiny", "no service was started yet; run: redraft serve"),
        ("import-draft none --recipe tiny", "redraft: there is no folder none"),
        slow("refresh --recipe tiny", "no champion target and draft yet; run: redraft build --recipe FILE"),
        slow("up --recipe tiny", "no champion target and draft yet; run: redraft build --recipe FILE"),
        slow("import-logs old.jsonl --recipe tiny", "no champion target yet"),
        slow("import-logs old.txt --recipe tiny", "old.txt: wanted a file ending in .jsonl, .json, .csv"),
        slow("promote 7", "draft 7"),
        slow("rollback", "there is no champion"),
        slow("diff 1 2", "draft 1"),
        slow("report --output none/page.html", "there is no folder"),
    ],
)
def test_what_can_not_be_is_one_line_and_exit_code_2(run, store, tmp_path, monkeypatch, command, told):
    (tmp_path / "home").mkdir()
    shutil.copy(store, tmp_path / "home")
    (tmp_path / "key.toml").write_text("[refresh]\nmin_rowz = 3\n")
    (tmp_path / "method.toml").write_text('[target]\nname = "smolm2"\n')
    (tmp_path / "old.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    result = run(*command.split())
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert told in result.stderr


def test_every_command_that_takes_a_recipe_takes_changes_to_it():
    taking = [command for _, command in commands() if "--recipe" in {opt for one in command.params for opt in one.opts}]
    assert len(taking) > 12
    assert all("--set" in {opt for one in command.params for opt in one.opts} for command in taking)


def test_a_recipe_with_changes_is_kept_in_the_home(run, tmp_path):
    source = '{name="synthetic", domain="math", count=10, num_groups=5}'
    maths = f"traffic.math={{source={source}, num_requests=5, num_held_out=2}}"
    changes = ("--set", "distill.num_epochs=3", "--set", maths)
    asked = run("traffic", "--recipe", "tiny", *changes, "--domain", "cod")
    assert 'has no domain "cod"; there are: chat, code, math' in asked.stderr
    [file] = (tmp_path / "home" / "recipes").iterdir()
    kept, of_tiny = load_recipe(str(file)), load_recipe("tiny")
    assert (kept.name, kept.distill.num_epochs, of_tiny.distill.num_epochs) == ("tiny", 3, 4)
    assert kept.traffic["chat"] == of_tiny.traffic["chat"]
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("change", "told"), [("distill.num_epoch=3", '"num_epochs"'), ("distill", "wanted KEY=VALUE")])
def test_a_wrong_change_of_a_recipe_is_one_line_and_exit_code_2(run, change, told):
    refused = run("traffic", "--recipe", "tiny", "--set", change)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert told in refused.stderr


MINE = """
distill = {{}}
target = {{ name = "pretrained", path = "{target}" }}
draft = {{ name = "eagle3", vocab_size = 64 }}
engine = {{ name = "vllm", max_model_len = 256 }}
[traffic.mine]
source = {{ name = "synthetic", count = 40, num_groups = 10 }}
num_train = {num_train}
num_held_out = 4
num_requests = 4
"""


@pytest.mark.slow
def test_a_doctor_who_is_shown_a_recipe_tells_each_fault_and_a_build_ends_at_once_with_the_first(run, tmp_path):
    recipe = tmp_path / "mine.toml"
    for model_type, num_train, told in (
        ("gpt2", 8, "vLLM's GPT2LMHeadModel hands out none (it has no SupportsEagle3)"),
        ("qwen3", 80, '"mine" has 40 prompts in 10 groups'),
    ):
        recipe.write_text(MINE.format(target=write_family(model_type, tmp_path / model_type), num_train=num_train))
        seen, built = run("doctor", "--recipe", str(recipe)), run("build", "--recipe", str(recipe))
        assert f"ok    target: {model_type}, 2 layers of 128, 259 tokens" in seen.output
        assert seen.exit_code == 1
        assert any(line.startswith("FAULT") and told in line for line in seen.output.splitlines())
        assert (built.exit_code, built.stderr.count("\n")) == (2, 1)
        assert told in built.stderr
    assert not list((tmp_path / "home" / "artifacts").glob("target"))


@pytest.mark.slow
def test_a_plan_is_the_whole_recipe_and_the_steps_that_would_run_and_runs_none(run, tmp_path):
    planned = run("build", "--recipe", "tiny", "--set", "distill.num_epochs=3", "--plan")
    assert planned.exit_code == 0
    tables = tomllib.loads(planned.stdout)
    assert parse_recipe(tables, "the plan") == parse_recipe(changed_tables("tiny", ["distill.num_epochs=3"]), "tiny")
    *_, last = planned.stdout.splitlines()
    assert (planned.stdout.count(": would run\n"), last) == (7, "# golden_tau: would run")
    assert not (tmp_path / "home" / "artifacts").exists()


def test_ctrl_c_is_exit_code_130(run, monkeypatch):
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_settings", interrupted)
    assert run("doctor").exit_code == 130


def test_a_fault_is_one_line_that_names_the_log_with_its_traceback(run, tmp_path, monkeypatch):
    def faulty() -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr(cli, "load_settings", faulty)
    failed, file = run("doctor"), tmp_path / "home" / "logs" / "commands.log"
    assert (failed.exit_code, failed.stderr) == (1, f"redraft: TypeError: no such thing; log: {file}\n")
    assert "in faulty" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.engine  # none, but the orchestrator that tests with engines run
def test_a_flow_that_fails_by_its_input_is_one_line_that_names_the_log_with_its_traceback(cli_in, tmp_path):
    (head := tmp_path / "head").mkdir()
    cli = cli_in(tmp_path / "home")
    with cli.start("import-draft", str(head), "--recipe", "tiny") as process:
        output, _ = process.communicate()
    assert process.returncode == 2, output
    assert "Traceback" not in output
    assert "ERROR" not in output
    file = cli.home / "logs" / "commands.log"
    *_, last = output.splitlines()
    assert (last.startswith("redraft: draft head: config.json"), last.endswith(f"; log: {file}")) == (True, True)
    assert "Traceback" in file.read_text()


def test_a_home_that_can_not_be_is_one_line_and_exit_code_2(run, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "file" / "home"))
    refused = run("status")
    told = f"redraft: [Errno 20] Not a directory: '{tmp_path / 'file' / 'home'}'\n"
    assert (refused.exit_code, refused.stderr) == (2, told)


@pytest.mark.parametrize(
    ("given", "missing"),
    [(["--model", "target"], "--attach"), (["--attach", "http://127.0.0.1:1", "--ca", "ca.pem"], "--model")],
)
def test_options_of_attached_servers_are_refused_where_they_would_do_nothing(run, given, missing):
    refused = run("up", "--recipe", "tiny", *given)
    assert refused.exit_code == 2
    assert missing in refused.output


@pytest.mark.slow
def test_publishing_goes_on_until_ctrl_c(tmp_path, store, own_environment):
    (tmp_path / "home").mkdir()
    shutil.copy(store, tmp_path / "home")
    # A shell that runs tests in its background has them ignore the signal, and so what they start.
    argv = ["env", "--default-signal=INT", sys.executable, "-u", "-m", "flows.cli", "publish", str(tmp_path / "drafts")]
    environment = os.environ | {"REDRAFT_HOME": str(tmp_path / "home")}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "no champion yet\n"
        program.send_signal(signal.SIGINT)
        assert program.wait(timeout=60) == 130
    assert not (tmp_path / "drafts").exists()
