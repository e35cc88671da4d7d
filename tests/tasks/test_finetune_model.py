"""The stage that finetunes: a second task changes the target, and is measured on text of its own."""

from pathlib import Path

import pytest
import torch

from models.checkpoints.loading import load_model
from tasks.finetune_model import finetune_model
from tasks.prepare_target import prepare_target
from tasks.prepare_text import prepare_text
from tests.tasks.made import recipe_of

pytestmark = pytest.mark.slow
TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 20, "num_held_out": 4}


def test_a_second_task_is_learnt_with_its_weight_and_one_of_weight_0_is_not(home: Path) -> None:
    made = []
    for second in ({}, {"second": {"domain": "chat", "weight": 0.0}}, {"second": {"domain": "chat"}}):
        table = {"method": {"name": "lora"}, "domain": "code", "max_length": 64, **second}
        recipe = recipe_of(text={"code": TEXT, "chat": TEXT}, finetune=table)
        target, text = prepare_target.fn(recipe.target), prepare_text.fn(recipe.text, recipe.seed)
        made.append(load_model(finetune_model.fn(recipe.finetune, recipe.seed, target, text).path).state_dict())
    plain, without, heard = made
    assert all(torch.equal(tensor, without[name]) for name, tensor in plain.items())
    assert any(not torch.equal(tensor, heard[name]) for name, tensor in plain.items())
