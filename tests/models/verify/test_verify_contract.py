"""The law of every verification rule: what is emitted follows the target, whatever the draft is.

A block's tokens are completed to K+1 by drawing the missing ones from the target, so each block is one draw from the
joint distribution over V^(K+1) outcomes, which is known exactly. A χ² test compares 200,000 of them. It is passed at
p-value 1e-4, so a right rule fails a case with that chance under a new seed; the seeds are fixed. Wrong rules of the
usual kinds must fail the same test, or passing it would mean little.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from models import catalog
from models.verify import Verified, emit

NUM_BLOCKS = 200_000
P_VALUE = 1e-4
RULES = [catalog.load("verify", name) for name in catalog.names("verify")]
LOSSLESS = [rule for rule in RULES if rule.LOSSLESS]
SAMPLING = [rule for rule in LOSSLESS if rule.SAMPLES]


@dataclass(frozen=True)
class Case:
    """A target and a draft as tables: the i-th, [V^i, V], holds the next token's law after a prefix of i tokens."""

    p: list[Tensor]
    q: list[Tensor]

    @property
    def size(self) -> int:
        return self.p[0].shape[-1]


def random_tables(depth: int, size: int, seed: int) -> list[Tensor]:
    """Distributions that differ from prefix to prefix, none below 0.03."""
    rng = torch.Generator().manual_seed(seed)
    weights = [torch.rand(size**i, size, generator=rng, dtype=torch.float64) ** 3 for i in range(depth)]
    return [0.03 + (1 - 0.03 * size) * weight / weight.sum(dim=-1, keepdim=True) for weight in weights]


def one_hot(tables: list[Tensor]) -> list[Tensor]:
    return [torch.nn.functional.one_hot(table.argmax(dim=-1), table.shape[-1]).double() for table in tables]


def halves(tables: list[Tensor], kept: int) -> list[Tensor]:
    """Probability on every other token only: even ones for `kept` 0, odd ones for 1."""
    masked = [table * (torch.arange(table.shape[-1]) % 2 == kept) for table in tables]
    return [table / table.sum(dim=-1, keepdim=True) for table in masked]


P3, Q2 = random_tables(3, 5, seed=1), random_tables(2, 5, seed=2)
P4, Q3 = random_tables(4, 4, seed=3), random_tables(3, 4, seed=4)
SAMPLED_CASES = {
    "K=2 V=5": Case(P3, Q2),
    "K=3 V=4": Case(P4, Q3),
    "K=1": Case(P4[:2], Q3[:1]),
    "no draft": Case(P4[:1], []),
    "draft is the target": Case(P3, P3[:2]),
    "draft is certain": Case(P3, one_hot(Q2)),
    "draft never right": Case(halves(P3, 0), halves(Q2, 1)),
}
GREEDY_CASES = {
    "K=2": Case(one_hot(P3), Q2),
    "K=3": Case(one_hot(P4), Q3),
    "draft is the target": Case(one_hot(P4), one_hot(P4)[:3]),
    "no draft": Case(one_hot(P4)[:1], []),
}


def draw(distributions: Tensor, rng: torch.Generator) -> Tensor:
    return torch.multinomial(distributions, 1, generator=rng)[:, 0]


def emitted_counts(verify: Callable[..., Verified], params: object, case: Case, seed: int) -> Tensor:
    """Return [V^(K+1)], how often each completed block came out of NUM_BLOCKS."""
    rng = torch.Generator().manual_seed(seed)
    prefix = torch.zeros(NUM_BLOCKS, dtype=torch.int64)
    drafted, q, p = [], [], [case.p[0][prefix]]
    for q_table, p_table in zip(case.q, case.p[1:], strict=True):
        q.append(q_table[prefix])
        drafted.append(draw(q[-1], rng))
        prefix = prefix * case.size + drafted[-1]
        p.append(p_table[prefix])
    draft_tokens = torch.stack(drafted, dim=1) if drafted else torch.empty(NUM_BLOCKS, 0, dtype=torch.int64)
    stacked_q = torch.stack(q, dim=1) if q else torch.empty(NUM_BLOCKS, 0, case.size)
    verified = verify(draft_tokens, stacked_q, torch.stack(p, dim=1), rng, params)
    check_form(verified, draft_tokens)
    block = torch.zeros(NUM_BLOCKS, dtype=torch.int64)
    for place, p_table in enumerate(case.p):
        token = verified.tokens[:, place]
        block = block * case.size + torch.where(token < 0, draw(p_table[block], rng), token)
    return torch.bincount(block, minlength=case.size ** len(case.p))


def check_form(verified: Verified, draft_tokens: Tensor) -> None:
    """Accepted tokens are the drafted ones, one more follows, then -1."""
    num_drafted = draft_tokens.shape[1]
    places = torch.arange(num_drafted + 1)
    ends = verified.num_accepted[:, None]
    assert verified.tokens.dtype == verified.num_accepted.dtype == torch.int64
    assert torch.equal(verified.tokens >= 0, places <= ends)
    kept = places[:-1] < ends
    assert torch.equal(verified.tokens[:, :-1][kept], draft_tokens[kept])


def law_p_value(verify: Callable[..., Verified], params: object, case: Case, seed: int = 0) -> float:
    """Return the χ² p-value of the emitted blocks against target-only sampling; 0 when an impossible block came out."""
    joint = case.p[0].flatten()
    for table in case.p[1:]:
        joint = (joint[:, None] * table).flatten()
    counts, possible = emitted_counts(verify, params, case, seed), joint > 0
    if counts[~possible].any():
        return 0.0
    if possible.sum() == 1:
        return 1.0
    return float(chisquare(counts[possible].double(), NUM_BLOCKS * joint[possible] / joint.sum()).pvalue)


def rule_id(rule: object) -> str:
    return rule.__name__.rsplit(".", maxsplit=1)[-1]


@pytest.mark.parametrize("case", SAMPLED_CASES.values(), ids=SAMPLED_CASES)
@pytest.mark.parametrize("rule", SAMPLING, ids=rule_id)
def test_a_lossless_rule_emits_the_targets_distribution(rule, case: Case) -> None:
    assert law_p_value(rule.verify, rule.Params(), case) > P_VALUE


@pytest.mark.parametrize("case", GREEDY_CASES.values(), ids=GREEDY_CASES)
@pytest.mark.parametrize("rule", LOSSLESS, ids=rule_id)
def test_a_lossless_rule_emits_the_targets_greedy_output(rule, case: Case) -> None:
    assert law_p_value(rule.verify, rule.Params(), case) > P_VALUE


def rejection_with(
    accept: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda u, p, q: u * q < p,
    residual: Callable[[Tensor, Tensor], Tensor] = lambda p, q: (p - q).clamp(min=0),
    bonus: Callable[[Tensor, Tensor], Tensor] = lambda p, q: p[:, -1],
    shift: int = 0,
) -> Callable[..., Verified]:
    """Build the rejection rule with one part exchanged; unchanged it is right."""

    def verify(draft_tokens: Tensor, q: Tensor, p: Tensor, rng: torch.Generator, params: object) -> Verified:
        judged_p = p.roll(-shift, dims=1)[:, :-1]
        drafted = draft_tokens[..., None]
        u = torch.rand(draft_tokens.shape, generator=rng, dtype=p.dtype)
        accepted = accept(u, judged_p.gather(-1, drafted)[..., 0], q.gather(-1, drafted)[..., 0])
        weights = torch.cat([residual(p[:, :-1], q), bonus(p, q)[:, None]], dim=1)
        weights = torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, p)
        return emit(draft_tokens, accepted, draw(weights.flatten(0, 1), rng).view(p.shape[:2]))

    return verify


PLANTED_BUGS = {
    "resamples from p instead of the residual": rejection_with(residual=lambda p, q: p),
    "resamples from |p - q|": rejection_with(residual=lambda p, q: (p - q).abs()),
    "resamples from q": rejection_with(residual=lambda p, q: q),
    "keeps every drafted token": rejection_with(accept=lambda u, p, q: q > 0),
    "keeps by p alone": rejection_with(accept=lambda u, p, q: u < p),
    "keeps when p is above q": rejection_with(accept=lambda u, p, q: p >= q),
    "turns the ratio around": rejection_with(accept=lambda u, p, q: u * p < q),
    "draws the bonus token from q": rejection_with(bonus=lambda p, q: q[:, -1]),
    "draws the bonus token one place early": rejection_with(bonus=lambda p, q: p[:, -2]),
    "judges by the p of one place later": rejection_with(shift=1),
}


def test_the_rule_that_the_bugs_are_planted_in_is_right() -> None:
    assert law_p_value(rejection_with(), None, SAMPLED_CASES["K=2 V=5"]) > P_VALUE


@pytest.mark.parametrize("verify", PLANTED_BUGS.values(), ids=PLANTED_BUGS)
def test_a_planted_bug_breaks_the_law(verify: Callable[..., Verified]) -> None:
    assert law_p_value(verify, None, SAMPLED_CASES["K=2 V=5"]) < P_VALUE


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_a_rule_is_deterministic_given_the_generators_seed(rule) -> None:
    case = SAMPLED_CASES["K=3 V=4"] if rule.SAMPLES else GREEDY_CASES["K=3"]
    counts = [emitted_counts(rule.verify, rule.Params(), case, seed=7) for _ in range(2)]
    assert torch.equal(*counts)


@pytest.mark.parametrize("rule", RULES, ids=rule_id)
@pytest.mark.parametrize(
    ("draft_tokens", "q_shape", "p_shape", "fault"),
    [
        (torch.zeros(2, 3), (2, 3, 5), (2, 4, 5), "draft_tokens must be"),
        (torch.zeros(3, dtype=torch.int64), (2, 3, 5), (2, 4, 5), "draft_tokens must be"),
        (torch.zeros(2, 3, dtype=torch.int64), (2, 3, 5), (2, 3, 5), r"p must be \[2, 4, V\], got \[2, 3, 5\]"),
        (torch.zeros(2, 3, dtype=torch.int64), (2, 3, 4), (2, 4, 5), r"q must be \[2, 3, 5\], got \[2, 3, 4\]"),
        (torch.full((2, 3), 5), (2, 3, 5), (2, 4, 5), "draft_tokens must be from 0 to 4"),
        (torch.full((2, 3), -1), (2, 3, 5), (2, 4, 5), "draft_tokens must be from 0 to 4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(rule, draft_tokens, q_shape, p_shape, fault) -> None:
    with pytest.raises(ValueError, match=fault):
        rule.verify(draft_tokens, torch.full(q_shape, 0.2), torch.full(p_shape, 0.2), torch.Generator(), rule.Params())
