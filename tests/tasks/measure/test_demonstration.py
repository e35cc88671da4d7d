"""The demonstration without a service: what a kill leaves, and what it asks; vLLM's own endpoint is in `test_stock`."""

from pathlib import Path

import pytest

from infra.client import Client
from infra.settings import load_settings
from models.recipe import Recipe, load_recipe
from tasks.measure import demonstration
from tasks.measure.cells import answers_of
from tasks.measure.demonstration import Demonstration, Stages
from tasks.measure.stock import Stock
from tasks.select_data import choose_prompts

NOWHERE = "http://127.0.0.1:1"


def demonstrated(recipe: Recipe, target: Path, folder: Path, stock: Stock | None = None) -> Demonstration:
    """Return a demonstration whose service has ended."""
    settings = load_settings({"REDRAFT_HOME": str(folder)})
    return Demonstration(recipe, recipe.demo, settings, folder, Client(NOWHERE, None), Stages(), target, stock)


def test_an_answer_that_a_kill_cut_short_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "before.jsonl").write_text('{"prompt_id": "a"}\n{"prompt_id": "b"}\n{"prompt_')
    assert [row["prompt_id"] for row in answers_of(tmp_path, "before")] == ["a", "b"]
    assert answers_of(tmp_path, "after") == []


def test_vllms_own_endpoint_waits_beside_the_service_where_they_share_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration, "ROOM_GIB", 0.0)
    found = [demonstration._has_room(load_settings({"REDRAFT_DEVICE": device})) for device in ("cpu", "cuda")]
    assert found == [True, False]


def test_a_further_window_goes_on_with_requests_that_nobody_has_sent() -> None:
    recipe = load_recipe("tiny")
    first, second, third = (demonstration.requests_until(window, recipe, recipe.demo) for window in (1, 2, 3))
    size = recipe.demo.num_requests
    assert [len(first), len(second), len(third)] == [size, 2 * size, 3 * size]
    assert (first, second) == (second[:size], third[: 2 * size])
    parts = choose_prompts("code", recipe.traffic["code"], recipe.seed)
    others = {prompt.id for prompt in [*parts["held_out"], *parts["requests"][size:]]}
    assert others
    assert not others & {prompt.id for prompt in third}
    assert len({prompt.id for prompt in third}) == 3 * size
