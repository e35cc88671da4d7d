"""The law of every verification rule: what is emitted follows the target, whatever the draft and its tree are.

The χ² test of `tests.models.verify.law` is passed at p-value 1e-4, so a right rule fails a case with that chance under
a new seed; the seeds are fixed. Wrong rules of the usual kinds must fail it, or passing it would mean little.

And what a rule expects to accept is what it does accept, in one exact sum over all answers.
"""

from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from models import catalog
from models.core.drafting.multi_draft import exact_outcome, most_kept
from models.core.drafting.proposal import Proposal
from models.engines import Sampling
from models.verify import Verified, emit, reject_in_turn
from tests.models.verify.law import (
    CUT,
    GREEDY_CASES,
    GREEDY_TREE_CASES,
    NUM_BLOCKS,
    P_VALUE,
    SAMPLED_CASES,
    TREE_CASES,
    Case,
    draw,
    emitted_counts,
    first_blocks,
    law_p_value,
    propose,
    random_tables,
    warped,
)

RULES = [catalog.load("verify", name) for name in catalog.names("verify")]
LOSSLESS = [rule for rule in RULES if rule.LOSSLESS]
SAMPLING = [rule for rule in LOSSLESS if rule.SAMPLES]
SILENT = ("knowledge_transfer", "typical")  # ids don't tell what these accepted
WITHOUT_Q = "coupled"  # what it emits is the same whatever q is, so it keeps less than may be kept


def rule_id(rule: object) -> str:
    return rule.__name__.rsplit(".", maxsplit=1)[-1]


def case_for(rule) -> Case:
    """A chain of three tokens."""
    return SAMPLED_CASES["K=3 V=4"] if rule.SAMPLES else GREEDY_CASES["K=3"]


@pytest.mark.parametrize("rule", SAMPLING, ids=rule_id)  # of one case in turn, which is drawn once
@pytest.mark.parametrize("case", [*SAMPLED_CASES.values(), *TREE_CASES.values()], ids=[*SAMPLED_CASES, *TREE_CASES])
def test_a_lossless_rule_emits_the_targets_distribution_or_refuses_the_proposal(rule, case: Case) -> None:
    if not case.taken_by(rule):
        with pytest.raises(ValueError, match=f"rule {rule_id(rule)} wants"):
            emitted_counts(rule.verify, rule.Params(), case, seed=0)
        return
    assert law_p_value(rule.verify, rule.Params(), case) > P_VALUE


@pytest.mark.parametrize("rule", LOSSLESS, ids=rule_id)
@pytest.mark.parametrize(
    "case",
    [*GREEDY_CASES.values(), *GREEDY_TREE_CASES.values()],
    ids=[*GREEDY_CASES, *(f"{name} of a tree" for name in GREEDY_TREE_CASES)],
)
def test_a_lossless_rule_emits_the_targets_greedy_output(rule, case: Case) -> None:
    """Only one block can come out, so that one other is enough to fail."""
    if case.taken_by(rule):
        assert law_p_value(rule.verify, rule.Params(), case, num_blocks=5_000) > P_VALUE


@pytest.mark.parametrize("rule", [rule for rule in RULES if "certain but one" in rule.SIBLINGS], ids=rule_id)
def test_a_chain_with_twigs_that_the_target_never_says_gives_what_the_chain_gives(rule) -> None:
    chain, tree = (-1, 0, 1), (-1, 0, 1, -1, 0)
    case = case_for(rule)
    plain, p = propose(case, 3)
    size = case.size + 1  # token 4 is never the target's
    p = torch.nn.functional.pad(p, (0, 1))
    q = torch.nn.functional.pad(plain.q, (0, 1))
    twig = torch.full((NUM_BLOCKS, 2), case.size)
    twigs = torch.nn.functional.one_hot(twig, size).to(q)
    flat = torch.full((NUM_BLOCKS, 2, size), 1 / size, dtype=p.dtype)
    outcomes = [
        rule.verify(proposal, laws, torch.Generator().manual_seed(5), rule.Params())
        for proposal, laws in (
            (Proposal(plain.token_ids, chain, q), p),
            (Proposal(torch.cat([plain.token_ids, twig], 1), tree, torch.cat([q, twigs], 1)), torch.cat([p, flat], 1)),
        )
    ]
    chances = [outcome.num_accepted.bincount(minlength=4).double() / NUM_BLOCKS for outcome in outcomes]
    torch.testing.assert_close(*chances, rtol=0, atol=4 * 0.5 / NUM_BLOCKS**0.5 * 2**0.5)
    assert int(outcomes[1].path.max()) <= 2


WAYS = [(rule, siblings) for rule in RULES if rule.SAMPLES for siblings in rule.SIBLINGS]


def places(num_siblings: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of p and q of 5 tokens: of any kind, with zeros, equal, with nothing in common, warped."""
    pairs = [(random_tables(1, 5, seed)[0][0], random_tables(1, 5, seed + 50)[0][0]) for seed in range(8)]
    p, q = pairs[0]
    zeros = [(p * torch.tensor([1.0, 1, 0, 1, 0]), q * torch.tensor([0.0, 1, 1, 1, 1])), (p, p)]
    zeros += [(p * torch.tensor([1.0, 0, 0, 0, 1]), q * torch.tensor([0.0, 1, 1, 1, 0])), (torch.eye(5)[2].double(), q)]
    warps = [(warped([p[None]], CUT)[0][0], warped([q[None]], Sampling(temperature=2.0))[0][0]) for p, q in pairs[1:4]]
    return [(p / p.sum(), q / q.sum()) for p, q in [*pairs, *zeros, *warps] if int((q > 0).sum()) >= num_siblings]


@pytest.mark.parametrize("num_siblings", [1, 2, 3])
@pytest.mark.parametrize(("rule", "siblings"), WAYS, ids=lambda one: one if isinstance(one, str) else rule_id(one))
def test_the_law_holds_exactly_at_one_place_and_no_more_is_kept_than_can_be(rule, siblings, num_siblings: int) -> None:
    """The sum over all siblings that may be drawn has no error of sampling: 1e-7 is what ρ of `spectr` is found to."""
    choose = partial(rule.choose, params=rule.Params())
    for p, q in places(num_siblings):
        outcome = exact_outcome(choose, p, q, num_siblings, siblings)
        assert float(outcome.emitted.sum()) == pytest.approx(1)
        if not rule.LOSSLESS:
            continue
        assert float(outcome.lost(p)) < 1e-7
        assert float(outcome.kept) <= float(most_kept(p[None], q[None], num_siblings, siblings)) + 1e-7
        if num_siblings == 1 and siblings in ("independent", "without replacement", "certain but one"):
            most = float(torch.minimum(p, q).sum())
            assert float(outcome.kept) >= most / (2 - most) - 1e-7  # (1 - TV) / (1 + TV)
            assert float(outcome.kept) == pytest.approx(most, abs=1e-7) or rule_id(rule) == WITHOUT_Q


@pytest.mark.parametrize(("name", "settings"), [("knowledge_transfer", {"eta": 0}), ("relaxed_nearest", {})])
def test_a_rule_that_moves_nothing_is_rejection(name: str, settings: dict[str, int]) -> None:
    rule, (p, q), tokens = catalog.load("verify", name), places(1)[0], torch.tensor([[0, 1]])
    found = rule.choose(p[None], tokens, q.expand(1, 2, 5), rule.Params(**settings))
    strict = reject_in_turn(p[None], tokens, q.expand(1, 2, 5))
    torch.testing.assert_close(found.chances, strict.chances)
    torch.testing.assert_close(found.rest, strict.rest)


CHAINS = {
    f"{kind}, {name}": case
    for kind, cases in (("sampled", SAMPLED_CASES), ("greedy", GREEDY_CASES))
    for name, case in cases.items()
    if case.q
}


def every_answer(tables: list[Tensor], depth: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return all answers [V^depth, depth], their probabilities, and [V^depth, depth] numbers of their prefixes."""
    size = tables[0].shape[-1]
    answers = torch.tensor(list(product(range(size), repeat=depth)))
    chance, prefix, prefixes = torch.ones(len(answers), dtype=torch.float64), torch.zeros(len(answers)).long(), []
    for place in range(depth):
        prefixes.append(prefix)
        chance = chance * tables[place][prefix, answers[:, place]]
        prefix = prefix * size + answers[:, place]
    return answers, chance, prefixes


@pytest.mark.parametrize("rule", RULES, ids=rule_id)  # of one case in turn, which is drawn once
@pytest.mark.parametrize("name", CHAINS)
def test_what_a_rule_expects_to_accept_of_the_targets_answers_is_what_it_accepts(rule, name: str) -> None:
    """The expectation over all answers is one sum; verification of drawn blocks must agree with it."""
    if name.startswith("sampled") and not rule.SAMPLES:
        return
    case = CHAINS[name]
    answers, chance, prefixes = every_answer(case.p, len(case.q))
    p, q = (
        torch.stack([table[prefix] for table, prefix in zip(tables, prefixes, strict=False)], dim=1)
        for tables in (case.p, case.q)
    )
    expected = rule.expected_accepted(answers, q, p, rule.Params())
    assert expected.shape == chance.shape
    proposal, laws = first_blocks(case, 11, 50_000)
    accepted = rule.verify(proposal, laws, torch.Generator().manual_seed(12), rule.Params()).num_accepted.double()
    error = 4.5 * float(accepted.std()) / len(laws) ** 0.5
    assert float((chance * expected).sum()) == pytest.approx(float(accepted.mean()), abs=error + 1e-6)


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_where_nothing_is_drafted_nothing_is_expected(rule) -> None:
    said, p = torch.zeros(1, 3, dtype=torch.int64), torch.tensor([1.0, 0.0]).expand(1, 3, 2)
    q = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]])
    assert rule.expected_accepted(said, q, p, rule.Params()).tolist() == [2.0]
    assert rule.expected_accepted(said, q * 0, p, rule.Params()).tolist() == [0.0]


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_ids_tell_what_was_accepted_or_the_rule_refuses_to_say(rule) -> None:
    if rule_id(rule) in SILENT:
        with pytest.raises(ValueError, match=f"{rule_id(rule)} may emit a token that it rejected"):
            rule.count_accepted([1], [1])
        return
    proposal, p = first_blocks(case_for(rule), 1, 500)
    verified = rule.verify(proposal, p, torch.Generator().manual_seed(2), rule.Params())
    for drafted, tokens, accepted in zip(
        proposal.token_ids.tolist(), verified.tokens.tolist(), verified.num_accepted.tolist(), strict=True
    ):
        emitted = tokens[: accepted + 1]
        counted = [rule.count_accepted(drafted, emitted[:cut]) for cut in range(1, len(emitted) + 1)]
        assert counted == [min(cut, accepted) for cut in range(1, len(emitted) + 1)]


def rejection_with(
    accept: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda u, p, q: u * q < p,
    residual: Callable[[Tensor, Tensor], Tensor] = lambda p, q: (p - q).clamp(min=0),
    bonus: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda p, q, before: p,
    shift: int = 0,
    next_round: Callable[[Tensor, Tensor], Tensor] = lambda p, left: left / left.sum(dim=-1, keepdim=True),
) -> Callable[..., Verified]:
    """Build the rejection rule with one part exchanged; unchanged it is right.

    Args:
        accept: of u, p(x) and q(x).
        residual: what a rejected token leaves.
        bonus: what is drawn from after the last token, of p there, the last q, and p before it.
        shift: how many rows too late p is read.
        next_round: what a sibling is judged by, of the first one's p and what is left of it.
    """

    def verify(proposal: Proposal, p: Tensor, rng: torch.Generator, params: object) -> Verified:
        judged = p.roll(-shift, dims=1)
        ends, left, final = torch.zeros(len(p), dtype=torch.int64), judged[:, 0], p[:, 0]
        for node, parent in enumerate(proposal.parents):
            token, q = proposal.token_ids[:, node, None], proposal.q[:, node]
            here, u = ends == parent + 1, torch.rand(len(p), generator=rng, dtype=p.dtype)
            kept = here & accept(u, left.gather(-1, token)[:, 0], q.gather(-1, token)[:, 0])
            rest = residual(left, q)
            rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, left)
            leaf = node not in proposal.parents
            final = torch.where(here[:, None], rest, final)
            after = bonus(p[:, node + 1], q, p[:, parent + 1]) if leaf else p[:, node + 1]
            final = torch.where(kept[:, None], after, final)
            left = torch.where(here[:, None], next_round(left, rest), left)
            left = torch.where(kept[:, None], judged[:, node + 1], left)
            ends = torch.where(kept, node + 1, ends)
        return emit(proposal, ends, draw(final, rng))

    return verify


PLANTED_BUGS = {
    "resamples from p instead of the residual": rejection_with(residual=lambda p, q: p),
    "resamples from |p - q|": rejection_with(residual=lambda p, q: (p - q).abs()),
    "resamples from q": rejection_with(residual=lambda p, q: q),
    "keeps every drafted token": rejection_with(accept=lambda u, p, q: q > 0),
    "keeps by p alone": rejection_with(accept=lambda u, p, q: u < p),
    "keeps when p is above q": rejection_with(accept=lambda u, p, q: p >= q),
    "turns the ratio around": rejection_with(accept=lambda u, p, q: u * p < q),
    "draws the bonus token from q": rejection_with(bonus=lambda p, q, before: q),
    "draws the bonus token one place early": rejection_with(bonus=lambda p, q, before: before),
    "judges by the p of one place later": rejection_with(shift=1),
    "judges a sibling by the untouched p": rejection_with(next_round=lambda p, left: p),
    "judges a sibling by a residual that does not sum to 1": rejection_with(next_round=lambda p, left: left),
}


def test_the_rule_that_the_bugs_are_planted_in_is_right() -> None:
    assert law_p_value(rejection_with(), None, TREE_CASES["branches"]) > P_VALUE


@pytest.mark.parametrize("verify", PLANTED_BUGS.values(), ids=PLANTED_BUGS)
def test_a_planted_bug_breaks_the_law(verify: Callable[..., Verified]) -> None:
    assert law_p_value(verify, None, TREE_CASES["branches"], num_blocks=50_000) < P_VALUE


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_a_rule_is_deterministic_given_the_generators_seed(rule) -> None:
    proposal, p = first_blocks(case_for(rule), 1, 2000)
    once, again, other = (
        rule.verify(proposal, p, torch.Generator().manual_seed(seed), rule.Params()) for seed in (7, 7, 8)
    )
    assert torch.equal(once.tokens, again.tokens)
    assert torch.equal(once.tokens, other.tokens) != rule.SAMPLES


@pytest.mark.parametrize("rule", SAMPLING, ids=rule_id)
def test_a_token_that_the_draft_could_not_have_drawn_is_refused(rule) -> None:
    proposal = Proposal.chain([1], [torch.tensor([1.0, 0.0])])
    with pytest.raises(ValueError, match="q gives a drafted token no probability"):
        rule.verify(proposal, torch.full((1, 2, 2), 0.5), torch.Generator(), rule.Params())


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
@pytest.mark.parametrize(
    ("token", "q_size", "p_shape", "fault"),
    [
        (0, 5, (2, 3, 5), r"p must be \[2, 4, V\], got \[2, 3, 5\]"),
        (0, 4, (2, 4, 5), r"q must be \[2, 3, 5\], got \[2, 3, 4\]"),
        (5, 5, (2, 4, 5), "token_ids must be from 0 to 4"),
        (-1, 5, (2, 4, 5), "token_ids must be from 0 to 4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(rule, token: int, q_size: int, p_shape, fault: str) -> None:
    proposal = Proposal(torch.full((2, 3), token), (-1, 0, 1), torch.full((2, 3, q_size), 0.2))
    with pytest.raises(ValueError, match=fault):
        rule.verify(proposal, torch.full(p_shape, 0.2), torch.Generator(), rule.Params())
