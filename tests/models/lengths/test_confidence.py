from dataclasses import replace
from pathlib import Path

import pytest

from models.core.drafting.draft_families import family_named
from models.core.throughput.cost import Cost
from models.lengths import View, confidence
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.tiny import make_tiny

VIEW = View(limit=5, steps=(), num_running=1, cost=Cost())


@pytest.mark.parametrize(
    ("confidences", "on"), [((0.9,), True), ((0.6,), True), ((0.59,), False), ((0.2, 0.8), True), ((0.99, 0.5), False)]
)
def test_the_last_token_alone_decides(confidences: tuple[float, ...], on: bool) -> None:
    assert confidence.go_on(replace(VIEW, confidences=confidences), confidence.Params(threshold=0.6)) is on


@pytest.mark.parametrize(("threshold", "lengths"), [(0.0, {4}), (1.0, {1})])
def test_steps_are_as_long_as_the_draft_is_sure(tiny_target: Path, threshold: float, lengths: set[int]) -> None:
    draft = make_tiny(family_named("lm"), tiny_target)
    lengths_table = {"name": "confidence", "threshold": threshold}
    (answer,) = answer_all(tiny_target, draft, prompts(1), num_draft_tokens=4, lengths=lengths_table)
    assert set(answer.drafted) == lengths
    assert answer.token_ids == answer_all(tiny_target, None, prompts(1))[0].token_ids
