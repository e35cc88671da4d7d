"""The whole first build on the tiny recipe, with the real engine."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from infra.artifacts import check_manifest
from models.sources import Prompt
from tests.flows.conftest import Cli, registry_of
from tests.models.tokenizers import byte_ids

pytestmark = pytest.mark.engine


def test_a_build_makes_a_target_with_golden_outputs_and_a_draft_the_champions(built, tmp_path):
    cli, output = built
    registry = registry_of(cli.home)
    target, draft = registry.champion("target"), registry.champion("draft")
    assert (target.number, draft.number) == (1, 1)
    assert "built: draft 1" in output
    golden = json.loads((registry.download(target, tmp_path) / "golden.json").read_text())
    assert len(golden["outputs"]) == 4
    assert draft.lineage.target.name
    assert "" not in draft.tags.values()
    assert draft.tags["target_sha256"] == target.tags["target_sha256"]
    assert json.loads(draft.tags["tau"])["chat"] > 1.1
    assert float(draft.tags["golden_tau"]) >= 1
    check_manifest(registry.download(draft, tmp_path))


def test_the_prompts_of_answers_have_the_ids_that_the_chat_template_gives_them(built, target_dir):
    def kept(kind: str) -> list[dict[str, Any]]:
        files = (built[0].home / "artifacts").glob(f"{kind}/*/train.jsonl")
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    asked = {prompt.id: prompt for prompt in map(Prompt.model_validate, kept("prompts"))}
    tokenizer, samples = AutoTokenizer.from_pretrained(target_dir), kept("samples")
    assert samples
    for sample in samples:
        chat = [message.model_dump() for message in asked[sample["id"]].messages]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert sample["prompt_ids"] == ids == byte_ids(chat)


def test_a_plan_tells_what_a_build_would_find_and_what_it_would_make(built, cli_in):
    told = cli_in(built[0].home).run("build", "--recipe", "tiny", "--plan", "--set", "distill.num_epochs=5")
    steps = dict(line.removeprefix("# ").split(": ") for line in told.splitlines() if line.startswith("# "))
    made = ["draft", "scores", "golden_tau"]
    assert [step for step, what in steps.items() if what == "would run"] == made
    assert all(what.startswith("cached, ") for step, what in steps.items() if step not in made)
    assert len(steps) == 7


def test_a_build_writes_nothing_outside_of_its_home_and_leaves_no_work_behind(built):
    cli, _ = built
    assert [*cli.home.parent.iterdir()] == [cli.home]  # where it was called
    assert [file for file in Path(cli.env["HOME"]).rglob("*") if file.is_file()] == []
    assert list((cli.home / "artifacts" / "work").iterdir()) == []
    assert list((cli.home / "artifacts").rglob(".staging-*")) == []


def test_a_second_build_makes_nothing_anew_except_what_is_damaged(built, cli_in, tmp_path):
    shutil.copytree(built[0].home, tmp_path / "home")
    damaged = next((tmp_path / "home" / "artifacts" / "draft").glob("*/model.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    output = cli_in(tmp_path / "home").run("build", "--recipe", "tiny")
    made = [line.split(" - ")[1].split(":")[0] for line in output.splitlines() if ": made, " in line]
    assert made == ["draft"]
    assert output.count(": cached, ") == 6
    assert "model.safetensors has" in output


def test_a_terminated_build_leaves_nothing_running(tmp_path):
    def session(pid: int) -> int | None:
        with suppress(ProcessLookupError):
            return os.getsid(pid)

    with Cli(tmp_path / "home").start("build", "--recipe", "tiny") as process:
        assert any("Beginning flow run" in line for line in process.stdout)
        process.terminate()
        process.communicate(timeout=60)  # whoever still runs holds the pipe open
    assert process.returncode == 130
    assert [pid for pid in psutil.pids() if session(pid) == process.pid] == []
