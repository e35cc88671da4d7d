"""Each tree with each verification rule and length policy in the reference engine: refused by name, or it answers."""

from itertools import product
from pathlib import Path

import pytest

from models import catalog
from models.core.drafting.draft_families import family_named
from models.drafts import Draft
from models.engines import Completion
from models.engines.torch import Params
from tests.models.drafts.answered import GREEDY, answer_all, prompts, require_equal
from tests.models.drafts.tiny import make_tiny
from tests.models.pairs.forms import chosen, named

pytestmark = pytest.mark.slow

K = 4
SHORT = GREEDY.model_copy(update={"max_tokens": 8})
TRIPLES = list(product(*map(catalog.names, ("trees", "verify", "lengths"))))
CHAINS = ("confidence", "pearl", "specdec_pp")  # policies of one token after another


def is_greedy(rule: str) -> bool:
    return not catalog.load("verify", rule).SAMPLES


def settings(tree: str, rule: str, lengths: str) -> dict[str, object]:
    """Return the engine's keys."""
    key = "verify_greedy" if is_greedy(rule) else "verify"
    ways = {"trees": {"name": tree}, key: {"name": rule}, "lengths": {"name": lengths}}
    return {"dtype": "float32", "num_draft_tokens": K, **ways}


def refusal(tree: str, rule: str, lengths: str) -> str:
    """Return what is said of what can't be combined, by hand; "" where it can."""
    if tree == "chain":
        return ""
    if lengths in CHAINS:
        return f"length policy {lengths} .* tree {tree} is no chain"
    siblings = f"tree {tree} proposes siblings that are certain; verify rule spectr wants independent ones"
    return siblings if rule == "spectr" else ""


TRIED = chosen([triple for triple in TRIPLES if not refusal(*triple)], lambda triple: triple[1] == "spectr")


def test_what_can_not_be_combined_is_refused_when_it_is_read() -> None:
    for triple in TRIPLES:
        if told := refusal(*triple):
            with pytest.raises(ValueError, match=told):
                Params(**settings(*triple))
        else:
            Params(**settings(*triple))


@pytest.fixture(scope="module")
def draft(tiny_target: Path) -> Draft:
    return make_tiny(family_named("lm"), tiny_target)


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[Completion]:
    return answer_all(tiny_target, None, prompts(2), SHORT)


@pytest.mark.parametrize(("tree", "rule", "lengths"), TRIED, ids=[named(triple) for triple in TRIED])
def test_what_can_be_combined_answers(
    tree: str, rule: str, lengths: str, tiny_target: Path, draft: Draft, plain: list[Completion]
) -> None:
    sampling = SHORT if is_greedy(rule) else SHORT.model_copy(update={"temperature": 0.8, "seed": 1})
    answers = answer_all(tiny_target, draft, prompts(2), sampling, **settings(tree, rule, lengths))
    if is_greedy(rule) and catalog.load("verify", rule).LOSSLESS:
        require_equal(answers, plain)
    for one in answers:
        assert len(one.token_ids) == SHORT.max_tokens
        assert all(0 <= taken <= drafted <= K for drafted, taken in zip(one.drafted, one.accepted, strict=True))
