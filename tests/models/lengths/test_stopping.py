"""Policies that end a step by how sure the draft is: `confidence`, and `specdec_pp`, whose head learns it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from models.core.drafting.draft_families import family_named
from models.core.layers.decoder import Decoder
from models.core.learning.hidden import Sample
from models.core.throughput.cost import Cost
from models.drafts import Draft
from models.engines.torch import Params as EngineParams
from models.engines.torch import TorchEngine
from models.lengths import View, confidence, specdec_pp
from models.lengths.specdec_pp import NUM_FEATURES, Params, estimate, go_on
from tests.models.drafts.answered import GREEDY, answer_all, prompts
from tests.models.drafts.tiny import make_tiny

VIEW = View(limit=6, steps=(), num_running=1, cost=Cost())


@pytest.fixture(scope="module")
def draft(tiny_target: Path) -> Draft:
    return make_tiny(family_named("lm"), tiny_target)


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    answers = answer_all(tiny_target, None, prompts(24))
    return [Sample(one.request_id, "text", [*one.prompt_ids], [*one.token_ids]) for one in answers]


@pytest.mark.parametrize(
    ("confidences", "on"), [((0.9,), True), ((0.6,), True), ((0.59,), False), ((0.2, 0.8), True), ((0.99, 0.5), False)]
)
def test_by_confidence_the_last_token_alone_decides(confidences: tuple[float, ...], on: bool) -> None:
    assert confidence.go_on(replace(VIEW, confidences=confidences), confidence.Params(threshold=0.6)) is on


@pytest.mark.parametrize(("threshold", "lengths"), [(0.0, {4}), (1.0, {1})])
def test_by_confidence_steps_are_as_long_as_the_draft_is_sure(tiny_target, draft, threshold, lengths) -> None:
    lengths_table = {"name": "confidence", "threshold": threshold}
    (answer,) = answer_all(tiny_target, draft, prompts(1), num_draft_tokens=4, lengths=lengths_table)
    assert set(answer.drafted) == lengths
    assert answer.token_ids == answer_all(tiny_target, None, prompts(1))[0].token_ids


@pytest.mark.parametrize(
    ("confidences", "on"), [((0.9,), True), ((0.9, 0.6), True), ((0.9, 0.5), False), ((0.5,), True), ((0.4,), False)]
)
def test_by_specdec_pp_the_product_decides(confidences: tuple[float, ...], on: bool) -> None:
    assert go_on(replace(VIEW, confidences=confidences), Params(threshold=0.5)) is on


def test_without_a_head_the_draft_is_taken_at_its_word() -> None:
    assert estimate(torch.tensor([0.7, 0.2, 0.1]).log(), 1, 0, Params()) == pytest.approx(0.7)


@pytest.mark.parametrize("size", [3, 300])
def test_features_are_as_many_for_every_vocabulary(size: int) -> None:
    logits = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = float("-inf")
    found = specdec_pp._features(logits, torch.tensor([1, 0]), 4)
    assert found.shape == (2, NUM_FEATURES)
    assert found.isfinite().all()
    assert found[:, -1].tolist() == [4, 4]
    assert found[0, specdec_pp.NUM_BEST] == pytest.approx(float(logits[0].log_softmax(-1)[1]))


class Noting(ModuleType):
    """The policy, never stopping, and what it says of the first token of each step."""

    def __init__(self) -> None:
        super().__init__("noting")
        self.said: list[float] = []

    def num_draft_tokens(self, view: View, params: Params) -> int:
        return view.limit

    def estimate(self, logits: Tensor, index: int, place: int, params: Params) -> float:
        self.said.append(estimate(logits, index, place, params))
        return self.said[-1]

    def go_on(self, view: View, params: Params) -> bool:
        return True


@pytest.mark.slow
def test_a_head_tells_tokens_that_are_accepted_from_others(tiny_target, draft, samples, tmp_path) -> None:
    fitted = specdec_pp.fit(draft, tiny_target, samples, 4, tmp_path, Params(rejection_weight=1.0), seed=0)
    engine = TorchEngine(
        Decoder.load(tiny_target, torch.float32), tiny_target, draft, None, EngineParams(num_draft_tokens=2)
    )
    policy = Noting()
    engine.lengths = policy, fitted
    kept = []
    for sample in samples:
        answer = asyncio.run(engine.generate(sample.prompt_ids, GREEDY, sample.id))
        kept += [accepted > 0 for accepted in answer.accepted[:-1]]  # the last step may be cut
        policy.said = policy.said[: len(kept)]
    said, accepted = torch.tensor(policy.said), torch.tensor(kept)
    assert 0.05 < float(accepted.float().mean()) < 0.95
    assert float(said[accepted].mean()) > float(said[~accepted].mean()) + 0.1
    assert float(said.mean()) == pytest.approx(float(accepted.float().mean()), abs=0.1)


@pytest.mark.parametrize(("temperature", "threshold", "length"), [(0.0, 1.0, 4), (0.0, 0.0, 1), (1.0, 0.0, 1)])
def test_steps_are_as_long_as_the_threshold_lets_them_be(tiny_target, draft, temperature, threshold, length) -> None:
    sampling = GREEDY.model_copy(update={"temperature": temperature, "seed": 1})
    lengths = {"name": "specdec_pp", "threshold": threshold}
    (answer,) = answer_all(tiny_target, draft, prompts(1), sampling, num_draft_tokens=4, lengths=lengths)
    assert set(answer.drafted) == {length}


@pytest.mark.slow
def test_a_rejection_that_weighs_more_makes_steps_shorter(tiny_target, draft, samples, tmp_path) -> None:
    drafted = []
    for weight in (0.1, 30.0):
        (tmp_path / str(weight)).mkdir()
        params = Params(rejection_weight=weight)
        fitted = specdec_pp.fit(draft, tiny_target, samples, 4, tmp_path / str(weight), params, seed=0)
        (answer,) = answer_all(tiny_target, draft, prompts(1), num_draft_tokens=4, lengths=fitted)
        drafted.append(sum(answer.drafted) / len(answer.drafted))
    assert drafted[0] > drafted[1]


def test_what_can_not_be_fit_or_read_is_refused(tiny_target, draft, samples, tmp_path) -> None:
    with pytest.raises(ValueError, match="no sample has an answer of more than two tokens"):
        specdec_pp.fit(draft, tiny_target, [samples[0]._replace(completion_ids=[5, 6])], 4, tmp_path, Params(), 0)
    with pytest.raises(ValueError, match="there is no file .*none"):
        estimate(torch.zeros(9), 0, 0, Params(head=tmp_path / "none"))
