"""The demonstration without a service: what a kill leaves, and the time of its stages."""

from pathlib import Path

import pytest

from models.recipe import load_recipe
from tasks.measure import demonstration
from tasks.measure.demo_files import answers_of
from tasks.select_data import choose_prompts


def test_an_answer_that_a_kill_cut_short_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "before.jsonl").write_text('{"prompt_id": "a"}\n{"prompt_id": "b"}\n{"prompt_')
    assert [row["prompt_id"] for row in answers_of(tmp_path, "before")] == ["a", "b"]
    assert answers_of(tmp_path, "after") == []


def test_a_stage_takes_until_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 4.0, 9.5, 11.0])
    monkeypatch.setattr(demonstration.time, "monotonic", lambda: next(moments))
    stages = demonstration.Stages()
    for name in ("build", "serve", "result"):
        stages.start(name)
    assert stages.seconds == {"build": 3.0, "serve": 5.5}
    assert stages.total_s() == 11.0


def test_a_further_window_goes_on_with_requests_that_nobody_has_sent() -> None:
    recipe = load_recipe("tiny")
    assert recipe.demo is not None
    first, second, third = (demonstration.requests_until(window, recipe, recipe.demo) for window in (1, 2, 3))
    size = recipe.demo.num_requests
    assert [len(first), len(second), len(third)] == [size, 2 * size, 3 * size]
    assert (first, second) == (second[:size], third[: 2 * size])
    parts = choose_prompts("code", recipe.traffic["code"], recipe.seed)
    others = {prompt.id for prompt in [*parts["held_out"], *parts["requests"][size:]]}
    assert others
    assert not others & {prompt.id for prompt in third}
    assert len({prompt.id for prompt in third}) == 3 * size
