"""Stages that make another target: a plain directory comes out, made once, and a killed one is gone on with."""

import shutil
from pathlib import Path

import pytest
import torch

from infra.artifacts import Artifact
from infra.registry import open_registry
from models.core.checkpoints.loading import load_model
from models.core.learning import training
from models.params import TrainingParams
from models.recipe import Recipe, load_recipe
from models.targets import describe
from tasks.change_model import change_model
from tasks.prepare_target import prepare_target
from tasks.prepare_text import prepare_text, read_documents, tokenise
from tasks.stages.change_target import held_out_losses
from tests.tasks.made import recipe_of

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(home: Path) -> Recipe:
    """A recipe that pretrains a tiny target for some steps, in a home of its own."""
    source = {"name": "synthetic", "domain": "code", "count": 80, "num_groups": 40}
    return recipe_of(
        text={"code": {"source": source, "num_train": 40, "num_held_out": 10}},
        target={"name": "scratch", "tokenizer": {"name": "random"}, "num_layers": 1, "num_heads": 2},
        pretrain={"num_epochs": 3, "batch_tokens": 1024, "learning_rate": 0.01, "checkpoint_s": 1e-9},
    )


def start(recipe: Recipe) -> tuple[Artifact, Artifact]:
    return prepare_target.fn(recipe.target), prepare_text.fn(recipe.text, recipe.seed)


def pretrained(recipe: Recipe, target: Artifact, text: Artifact) -> Artifact:
    return change_model.fn("pretrain", recipe.pretrain, recipe.seed, target, text)


def held_out(target: Artifact, text: Artifact) -> float:
    documents = tokenise(read_documents(text.path, "held_out"), target.path)
    return held_out_losses(load_model(target.path), documents)["code"]


def test_a_pretrained_target_knows_the_text_keeps_tokenizer_template_and_format_and_is_a_run(recipe: Recipe) -> None:
    target, text = start(recipe)
    trained = pretrained(recipe, target, text)
    assert held_out(trained, text) < held_out(target, text) - 1
    [metrics] = open_registry().store.recorded("pretrain")
    assert metrics["held_out/code"] == pytest.approx(held_out(trained, text), rel=0.01)  # of float32, saved in bfloat16
    assert metrics["steps"] > 0
    before, after = describe(target.path), describe(trained.path)
    assert after.tokenizer_sha256 == before.tokenizer_sha256
    assert after.chat_template_sha256 == before.chat_template_sha256
    assert after.sha256 != before.sha256
    assert (trained.path / "model.safetensors").stat().st_size == (target.path / "model.safetensors").stat().st_size
    assert pretrained(recipe, target, text) == trained


def test_a_killed_stage_goes_on_and_ends_as_one_that_was_not(
    recipe: Recipe, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, text = start(recipe)
    whole = pretrained(recipe, target, text)
    (tmp_path / "other").mkdir()
    shutil.copy(store, tmp_path / "other")
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "other"))
    target, text = start(recipe)
    rate, steps = training.learning_rate, []

    def killing(params: TrainingParams, step: int, total: int) -> float:
        steps.append(step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return rate(params, step, total)

    monkeypatch.setattr(training, "learning_rate", killing)
    with pytest.raises(KeyboardInterrupt):
        pretrained(recipe, target, text)
    assert pretrained(recipe, target, text).sha256 == whole.sha256
    assert steps[4] == 3  # not from the start


def test_a_second_task_is_learnt_with_its_weight_and_one_of_weight_0_is_not(home: Path) -> None:
    made, size = [], {"source": {"name": "synthetic", "count": 60}, "num_train": 20, "num_held_out": 4}
    for second in ({}, {"second": {"domain": "chat", "weight": 0.0}}, {"second": {"domain": "chat"}}):
        table = {"method": {"name": "lora"}, "domain": "code", "max_length": 64, **second}
        recipe = recipe_of(text={"code": size, "chat": size}, finetune=table)
        made.append(change_model.fn("finetune", recipe.finetune, recipe.seed, *start(recipe)))
    plain, without, heard = (load_model(one.path).state_dict() for one in made)
    assert all(torch.equal(tensor, without[name]) for name, tensor in plain.items())
    assert any(not torch.equal(tensor, heard[name]) for name, tensor in plain.items())


def test_too_short_a_calibration_is_told_with_what_would_do(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    recipe = load_recipe("full-chain-tiny")
    for prune, told in ((recipe.prune, True), (recipe.prune.model_copy(update={"num_documents": 60}), False)):
        caplog.clear()
        change_model.fn("prune", prune, recipe.seed, *start(recipe))
        assert ("1024 are 4 times the widest layer's inputs" in caplog.text) == told
