"""Heads on the last hidden state: they keep to their number, need the target's states, and are refused if spoilt."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.drafting.draft_families import family_named, open_draft
from models.drafts import Family, Rows
from models.evaluation.scoring import trace
from models.learning.hidden import Sample
from models.targets import describe
from tests.models.drafts.tiny import save_tiny

NAMES = ["hydra", "medusa"]
K = 4


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> Family:
    return family_named(request.param)


@pytest.fixture(scope="module")
def saved(family: Family, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(family, tiny_target, tmp_path_factory.mktemp("draft"))


def test_no_more_is_drafted_than_there_are_heads(saved: Path, tiny_target: Path) -> None:
    draft = open_draft(saved, tiny_target)
    assert draft.max_depth == K
    drafter = draft.drafter(30)
    drafter.extend(torch.arange(3, 13), torch.randn(9, 128))
    tokens = list(range(3, 3 + K))
    with torch.inference_mode():
        assert drafter.propose(K + 3, lambda logits: (int(logits.argmax()) + 3, None)).num_tokens == K
        at_most = drafter.expand(tokens, list(range(-1, K - 1)), [K - 2, K - 1])
    assert at_most[0].exp().sum() == pytest.approx(1)
    assert at_most[1].tolist() == [float("-inf")] * 259
    rows = Rows(torch.randn(1, 9, 128), torch.full((1, 20), 5), torch.tensor([0]), torch.tensor([4]))
    assert len(draft.unroll(rows, K + 3)) == K
    assert draft.num_unrolled(1) == draft.num_unrolled(64) == K


def test_only_as_many_count_as_drafted_as_there_are_heads(saved: Path, tiny_target: Path, tmp_path: Path) -> None:
    sample = Sample("a", "d", [5, 6, 7], list(range(8, 30)))
    (told,) = trace(open_draft(saved, tiny_target), tiny_target, [sample], K + 2, tmp_path)
    assert set(told.drafted) == {K}


def test_a_draft_without_the_targets_states_is_an_error_that_says_so(saved: Path, tiny_target: Path) -> None:
    draft = open_draft(saved, tiny_target)
    rows = Rows(torch.empty(1, 9, 0), torch.full((1, 20), 5), torch.tensor([0]), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"reads the target's last hidden state, 128 wide; got states of width 0"):
        draft.unroll(rows, 1)


def test_the_vocabulary_stays_in_a_refresh(family: Family, saved: Path, tiny_target: Path) -> None:
    draft = open_draft(saved, tiny_target)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    counts = np.zeros(259)
    counts[100:164] = 1
    after = family.renew(draft, tiny_target, counts).state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert draft.vocabulary.tolist() == list(range(3, 67))


Weights = dict[str, Tensor]


def nan(weights: Weights) -> Weights:
    weights["blocks.0.layers.0.weight"][0, 0] = float("nan")
    return weights


def outside(weights: Weights) -> Weights:
    weights["token_map"][-1] = 259
    return weights


def twice(weights: Weights) -> Weights:
    weights["token_map"][1] = weights["token_map"][0]
    return weights


def without_a_head(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != "lm_heads.3.weight"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan, r"tensor blocks.0.layers.0.weight holds NaN"),
        (outside, "token_map must name ascending tokens of 0 to 258; got 3 to 259"),
        (twice, "token_map must name ascending tokens of 0 to 258"),
        (without_a_head, r"tensor lm_heads.3.weight is missing"),
    ],
)
def test_spoiled_heads_are_refused_by_the_name_of_what_is_wrong(
    family: Family, saved: Path, tiny_target: Path, tmp_path: Path, spoil: Callable[[Weights], Weights], message: str
) -> None:
    shutil.copy(saved / "config.json", tmp_path)
    save_file(spoil(load_file(saved / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        family.check(tmp_path, saved, describe(tiny_target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads 0; wanted a number from 1"),
        ({"truncated_vocab_size": None}, "truncated_vocab_size None; wanted a number from 1"),
        ({"hidden_size": 64}, "hidden_size 64, the target has 128"),
        ({"num_heads": 3}, "differs from the served draft in num_heads"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    family: Family, saved: Path, tiny_target: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    shutil.copy(saved / "model.safetensors", tmp_path)
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        family.check(tmp_path, saved, describe(tiny_target))
