"""Imported answers that are unlike the target's: told before anything learns, and never what drafts are held to."""

import logging

import pytest
import torch

from infra.artifacts import Artifact
from infra.settings import load_settings
from models.core.checkpoints.loading import load_model
from models.core.learning import answering
from models.core.learning.hidden import Sample
from models.recipe import load_recipe
from models.targets import stop_ids
from tasks.stages.imported import gate_by_own_answers
from tests.models.drafts.answered import prompts

RECIPE = load_recipe("tiny")
TEXT = b"Paris is the capital of France."


pytestmark = pytest.mark.usefixtures("home")


def written(number: int, name: str = "import-") -> list[Sample]:
    """Return answers that a person wrote, one weighing more than the others."""
    ids = [3 + byte for byte in TEXT]
    asked = enumerate(prompts(number))
    return [Sample(f"{name}{place}", "chat", one, ids, 1.0, f"c{place}", 1.0 + (place == 0)) for place, one in asked]


def own(target: Artifact, of: list[Sample]) -> list[Sample]:
    model, rng = load_model(target.path), torch.Generator().manual_seed(1)
    return answering.answer(model, of, [24] * len(of), stop_ids(target.path), 256, rng)


@pytest.mark.slow
def test_domains_whose_imports_are_unlike_are_judged_by_the_targets_own_answers(
    target: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    human, served = written(14), written(2, "served-")
    like = [one._replace(id=f"{one.id}-like", domain="code") for one in own(target, written(14))]
    parts = {"train": human[:8] + like[:8], "held_out": human[8:12] + like[8:] + served, "regression": human[12:]}
    with caplog.at_level(logging.WARNING):
        judged, unlike = gate_by_own_answers(RECIPE, target, parts)
    assert list(unlike) == ["chat"]
    assert unlike["chat"].high < -0.2
    assert "imported answers of chat are unlike the target's" in caplog.text
    assert judged["train"] == parts["train"]  # learnt all the same
    assert [one for one in judged["held_out"] if one.domain == "code" or one in served] == like[8:] + served
    answered = [one for part in ("held_out", "regression") for one in judged[part] if one.id.startswith("import-")]
    answered = [one for one in answered if one.domain == "chat"]
    assert [one.id for one in answered] == [one.id for one in human[8:]]
    for before, after in zip(human[8:], answered, strict=True):
        assert after._replace(completion_ids=[]) == before._replace(completion_ids=[])
        assert after.completion_ids != before.completion_ids
    model = load_model(target.path)
    assert answering.compare(model, answered).value > answering.compare(model, human[:2]).value + 0.2
    assert gate_by_own_answers(RECIPE, target, parts) == (judged, unlike)


def test_rows_that_were_served_here_are_never_asked_about(target: Artifact) -> None:
    parts = {"train": written(4, "served-"), "held_out": [], "regression": []}
    assert gate_by_own_answers(RECIPE, target, parts) == (parts, {})
    assert not (load_settings().artifacts / "unlike").exists()


@pytest.mark.slow
def test_an_answer_that_would_not_have_been_logged_is_dropped_with_its_row(
    target: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    human = written(12)
    monkeypatch.setattr("infra.scrub.scrub", lambda text: "[taken out]")
    judged, unlike = gate_by_own_answers(RECIPE, target, {"train": human[:6], "held_out": human[6:], "regression": []})
    assert (list(unlike), judged["held_out"]) == (["chat"], [])
