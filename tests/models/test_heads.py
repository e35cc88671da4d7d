"""Heads on the last hidden state: they learn what is planted, keep to their number, and are refused if spoilt."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models import catalog, distill
from models.drafts import Family, Rows, family_named, open_draft
from models.engines import Sampling
from models.heads import Heads
from models.hidden import Sample
from models.scoring import score, trace
from models.targets import describe
from tests.models import planted
from tests.models.drafts.answered import answer_all
from tests.models.drafts.tiny import save_tiny
from tests.models.engines.sampled import P_VALUE, sampled_p_value

NAMES = ["hydra", "medusa"]
VERIFY = {name: catalog.load("verify", name) for name in catalog.names("verify")}
# The likeliest tokens of a tree are certain.
RULES = [name for name, rule in VERIFY.items() if rule.LOSSLESS and rule.SAMPLES and "certain" in rule.SIBLINGS]
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planted")
    planted.build(directory)
    return directory


@pytest.fixture(scope="module")
def held_out(target: Path) -> dict[float, list[Sample]]:
    """Temperature to answers that no draft learns from."""
    return {temperature: planted.answers(target, 8, temperature, seed=1) for temperature in (0.0, 1.0)}


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Heads, Heads]]:
    """Family to a new draft and a trained one."""
    samples = planted.answers(target, 40, 1.0, seed=0) + planted.answers(target, 24, 0.0, seed=2)
    params = distill.Params(num_epochs=16, batch_tokens=512, learning_rate=4e-3, num_threads=1)
    found = {}
    for name in NAMES:
        family = family_named(name)
        new, draft = (family.create(family.Params(vocab_size=70), target, np.ones(259)) for _ in range(2))
        distill.train(draft, target, samples, params, K, tmp_path_factory.mktemp("work"))
        found[name] = new, draft
    return found


def tau(draft: Heads, target: Path, samples: list[Sample], work: Path) -> float:
    scores = score(draft, target, samples, K, work)
    return 1 + sum(one.accepted for one in scores) / sum(one.steps for one in scores)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_teaches_every_head_what_is_planted(
    name: str,
    target: Path,
    held_out: dict[float, list[Sample]],
    trained: dict[str, tuple[Heads, Heads]],
    tmp_path: Path,
) -> None:
    new, draft = trained[name]
    before, after = (tau(one, target, held_out[0.0], tmp_path) for one in (new, draft))
    assert before < 1.5 < 3.0 < after, (before, after)


@pytest.mark.slow
def test_heads_that_read_what_was_drafted_are_accepted_more_where_the_text_forks(
    target: Path, held_out: dict[float, list[Sample]], trained: dict[str, tuple[Heads, Heads]], tmp_path: Path
) -> None:
    """Given the tokens before, the next one is of two; without, head k's is of 2ᵏ⁺¹."""
    hydra, medusa = (tau(trained[name][1], target, held_out[1.0], tmp_path) for name in NAMES)
    assert hydra > medusa + 0.8, (hydra, medusa)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tree", ["chain", "static", "sequoia", "dynamic"])
def test_a_trained_draft_saves_steps_and_changes_no_token(
    name: str, tree: str, target: Path, held_out: dict[float, list[Sample]], trained: dict[str, tuple[Heads, Heads]]
) -> None:
    asked = [sample.prompt_ids for sample in held_out[0.0]]
    sampling = Sampling(max_tokens=24, ignore_eos=True, num_logprobs=2)
    num_draft_tokens = K if tree == "chain" else 12
    answers = answer_all(
        target, trained[name][1], asked, sampling, num_draft_tokens=num_draft_tokens, trees={"name": tree}
    )
    for sample, answer in zip(held_out[0.0], answers, strict=True):
        assert list(answer.token_ids) == sample.completion_ids or min(answer.gaps) < 1e-3
    assert sum(len(answer.drafted) for answer in answers) < 23 * len(answers) / 2


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_every_lossless_rule_keeps_the_targets_distribution_with_a_tree_of_heads(
    rule: str, target: Path, trained: dict[str, tuple[Heads, Heads]]
) -> None:
    assert sampled_p_value(target, trained["hydra"][1], num_draft_tokens=7, rule=rule, tree="static") > P_VALUE
