"""Refreshes on top of a tiny build: real processes, a real kill."""

import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.recipe import load_recipe
from infra.consent import QueryRow
from infra.querylog import QueryLog
from infra.registry import Registry
from models.sources import Prompt
from models.tokens import encode_chat
from tasks.select_data import choose_prompts

pytestmark = pytest.mark.engine

NUM_TOKENS = 24


@pytest.fixture(scope="session")
def rows(built, tmp_path_factory) -> list[QueryRow]:
    """Return requests of the domain "code" as the service would have logged them: answered by the build's target."""
    home = built[0].home
    registry = Registry(f"sqlite:///{home / 'mlflow.db'}", home / "artifacts" / "mlflow")
    target_dir = registry.download(registry.champion("target"), tmp_path_factory.mktemp("cache"))
    prompts = choose_prompts("code", load_recipe("tiny").traffic["code"], seed=0)["requests"]
    return _answered(target_dir, prompts)


def _answered(target_dir: Path, prompts: Sequence[Prompt]) -> list[QueryRow]:
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    rows = []
    for prompt in prompts:
        ids = encode_chat(tokenizer, [message.model_dump() for message in prompt.messages])
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([ids]),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=False,
            )
        rows.append(
            QueryRow(
                id=prompt.id,
                time_ms=0,
                domain="code",
                consent="full",
                scrubber_revision=1,
                target_version=1,
                draft_version=1,
                prompt_ids=ids,
                completion_ids=output[0, len(ids) :].tolist(),
                sampling={"temperature": 0.0},
                finish_reason="length",
                speculating=True,
            )
        )
    return rows


@pytest.fixture
def home(built, tmp_path) -> Path:
    """Return a copy of the build's home. The registry names its files by absolute path, so they stay where they are."""
    shutil.copytree(built[0].home, tmp_path / "home")
    return tmp_path / "home"


def registry_of(home: Path) -> Registry:
    return Registry(f"sqlite:///{home / 'mlflow.db'}", home / "artifacts" / "mlflow")


def test_with_too_few_rows_there_is_nothing_to_do(home, rows, cli_in):
    QueryLog(home / "queries.db").append(rows[:20])
    assert "nothing to do: 20 rows wait, 60 are wanted" in cli_in(home).run("refresh", "--recipe", "tiny")
    assert registry_of(home).champion("draft").number == 1


def test_a_killed_refresh_goes_on_and_each_row_is_trained_on_once(home, rows, cli_in):
    cli, log = cli_in(home), QueryLog(home / "queries.db")
    log.append(rows)
    _kill_when(
        cli.start("refresh", "--recipe", "tiny"), lambda: any((home / "artifacts" / "work").glob("*/hidden/*.bin"))
    )
    assert registry_of(home).champion("draft").number == 1
    assert log.cursor() == 0

    output = cli.run("refresh", "--recipe", "tiny")
    versions = registry_of(home).versions("draft")
    assert [version.number for version in versions] == [2, 1]
    assert "promoted: draft 2" in output
    champion = registry_of(home).champion("draft")
    assert champion.number == 2
    assert champion.tags["parent"] == "1"
    assert (champion.tags["window_first_seq"], champion.tags["window_last_seq"]) == ("1", str(len(rows)))
    assert champion.tags["gate"] == "passed"
    assert log.cursor() == len(rows)
    assert "nothing to do" in cli.run("refresh", "--recipe", "tiny")

    _forget_commit(home)  # as if the run had died between the promotion and the commit
    assert "already trained: draft 2" in cli.run("refresh", "--recipe", "tiny")
    assert log.cursor() == len(rows)
    assert len(registry_of(home).versions("draft")) == 2


def _kill_when(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    with process:
        while not ready():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        process.kill()
        process.wait()
        os.killpg(process.pid, signal.SIGKILL)  # Prefect's own server outlives the one that started it


def _forget_commit(home: Path) -> None:
    with closing(sqlite3.connect(home / "queries.db", isolation_level=None)) as db:
        db.execute("DELETE FROM committed")
        db.execute("UPDATE counters SET value = 0 WHERE name = 'cursor'")
