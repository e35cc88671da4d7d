"""Draft families with losses, sources of answers, rules, trees and length policies, and these with each other.

They are refused by name, or work: what is trained moves, what is frozen stays, the saved draft loads again; what is
drafted changes no greedy output.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from models import catalog
from models.core.drafting.draft_families import class_of, family_named, is_trained
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.engines import Completion
from models.engines.torch import Params
from models.params import BaseParams
from tests.models.drafts.answered import GREEDY, answer_all, prompts, require_equal
from tests.models.drafts.tiny import make_tiny
from tests.models.pairs.forms import chosen, named

pytestmark = pytest.mark.slow

FAMILIES = catalog.names("drafts")
TRAINED = [name for name in FAMILIES if is_trained(family_named(name))]
K = 4
SHORT = GREEDY.model_copy(update={"max_tokens": 8})


def never(pair: object) -> bool:
    """No pair is tried in any case."""
    return False


def options(*families: str) -> list[tuple[str, str]]:
    """Return family and name of each method of some families."""
    return [(family, name) for family in families for name in catalog.names(family)]


LEARNT = chosen(list(product(TRAINED, options("losses", "answers"))), never)
DRAFTED = chosen(list(product(FAMILIES, options("verify", "trees", "lengths"))), never)


def samples() -> list[Sample]:
    """Answers of two domains, of which some were rejected in part."""
    rng = torch.Generator().manual_seed(0)
    texts = torch.randint(3, 67, (4, 20), generator=rng).tolist()
    domains = ["chat", "rationale"] * 2
    return [
        Sample(str(number), domain, text[:8], text[8:], rejected=[2])
        for number, (domain, text) in enumerate(zip(domains, texts, strict=True))
    ]


@pytest.mark.parametrize(("name", "option"), LEARNT, ids=["+".join((name, *option)) for name, option in LEARNT])
def test_a_family_learns_from_one_step(name: str, option: tuple[str, str], tiny_target: Path, tmp_path: Path) -> None:
    family, method = family_named(name), parsed(*option)
    settings = (
        {"loss": method} if option[0] == "losses" else {"answers": method, "loss": parsed("losses", "forward_kl")}
    )
    draft = make_tiny(family, tiny_target)
    before = {key: one.clone() for key, one in draft.named_parameters()}
    params = distill.Params(num_epochs=1, batch_tokens=512, learning_rate=1e-2, **settings)
    work, directory = tmp_path / "work", tmp_path / "draft"
    work.mkdir()
    directory.mkdir()
    assert distill.train(draft, tiny_target, samples(), params, K, work).num_steps >= 1
    moved = {key for key, one in draft.named_parameters() if not torch.equal(one, before[key])}
    learnt = {key for key, one in draft.named_parameters() if one.requires_grad}
    assert moved and moved <= learnt
    family.save(draft, directory)
    again = dict(family.load(directory, tiny_target).named_parameters())
    for key in learnt:
        torch.testing.assert_close(
            again[key].float(), dict(draft.named_parameters())[key].float(), rtol=0.01, atol=0.01
        )


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[Completion]:
    return answer_all(tiny_target, None, prompts(2), SHORT)


@pytest.mark.parametrize(("name", "option"), DRAFTED, ids=["+".join((name, *option)) for name, option in DRAFTED])
def test_a_family_drafts_or_is_refused(name, option, tiny_target, plain) -> None:
    family, method = family_named(name), catalog.load(*option)
    greedy = option[0] != "verify" or not method.SAMPLES
    key = option[0] if option[0] != "verify" else "verify_greedy" if greedy else "verify"
    sampling = SHORT if greedy else SHORT.model_copy(update={"temperature": 0.8, "seed": 1})
    draft = make_tiny(family, tiny_target)
    try:
        answers = answer_all(tiny_target, draft, prompts(2), sampling, num_draft_tokens=K, **{key: parsed(*option)})
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert class_of(family).__name__ in refused
        assert ("trees = chain" if option[0] == "trees" else option[1]) in refused
    else:
        require_answers(answers, plain if greedy and getattr(method, "LOSSLESS", True) else None)


def require_answers(answers: list[Completion], plain: list[Completion] | None) -> None:
    """Fail unless answers are whole and, where there are plain ones, equal to these."""
    if plain:
        require_equal(answers, plain)
    for one in answers:
        assert len(one.token_ids) == SHORT.max_tokens
        assert all(0 <= taken <= drafted <= K for drafted, taken in zip(one.drafted, one.accepted, strict=True))


def parsed(family: str, name: str) -> BaseParams:
    """Return a method's default settings."""
    return catalog.parse(family, {"name": name})


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


@pytest.mark.parametrize(("tree", "rule", "lengths"), TRIED, ids=[named(triple) for triple in TRIED])
def test_what_can_be_combined_answers(tree, rule, lengths, tiny_target, plain) -> None:
    draft = make_tiny(family_named("lm"), tiny_target)
    sampling = SHORT if is_greedy(rule) else SHORT.model_copy(update={"temperature": 0.8, "seed": 1})
    answers = answer_all(tiny_target, draft, prompts(2), sampling, **settings(tree, rule, lengths))
    require_answers(answers, plain if is_greedy(rule) and catalog.load("verify", rule).LOSSLESS else None)
