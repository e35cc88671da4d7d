"""Losses by hand, and what the values of some are near their ends and in the mean; of `tvd_plus_plus` the gradient."""

from math import exp, log, sqrt

import pytest
import torch
from torch import Tensor

from models import catalog
from models.losses import Drafted, jsd, total_variation, tvd_plus_plus

EVEN, ODD, FAR, NOTHING = [0.5, 0.5], [0.25, 0.75], [0.1, 0.9], [0.0, 0.0]
KL, TV = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75), 0.25  # of ODD from EVEN
APART = {"target_probs": [EVEN]}
WEIGHT = exp(-3 * 0.75)  # λ where 0.75 is accepted


def kl(left: list[float], right: list[float]) -> float:
    return sum(a * log(a / b) for a, b in zip(left, right, strict=True))


def features(draft: list[list[float]], target: list[list[float]], **others: list[object]) -> dict[str, object]:
    """Columns of a loss on hidden states; what it makes of probabilities is 0 if nothing else is said."""
    return {"draft_hidden": draft, "target_hidden": target, "target_probs": [NOTHING] * len(draft), **others}


HINT = features([[1.0, 3.0]] * 2, [[0.0, 1.0]] * 2, token=[0, -1])
NEXT = features([[0.5, 2.0]], [NOTHING], target_probs=[[0.5, 0.25]])
# Sums of squares 3 and 4 of the draft, 8 and 6 of the target: maps (3, 4) / 5 and (4, 3) / 5.
ATTENTION = features([[sqrt(3), 0.0], [0.0, 2.0]], [[2.0, -2.0], [sqrt(3), sqrt(3)]], target_probs=[EVEN, [1.0, 0.0]])
# On: 0.5 misses 0.5 and −2 misses 3; off: 1 misses 2, −5 nothing.
SIDES = features([[0.5, -2.0, 1.0, -5.0]], [[3.0, 0.1, -4.0, 0.0]])
STRONG = features([[1.0, 70.0, -1.0]], [[0.1, 0.1, -9.0]])
# Neurons of the target [1, 0] and [0, 1], of the draft [1, 0] twice: means of the kernel are ½, 1 and ½.
NEURONS = features([[1.0, 2.0], NOTHING], [[3.0, 0.0], [0.0, 4.0]])


@pytest.mark.parametrize(
    ("name", "params", "q", "columns", "wanted"),
    [
        ("cross_entropy", {}, [ODD, ODD], {"token": [0, -1]}, [-log(0.25), 0.0]),
        ("forward_kl", {}, [EVEN], {"target_probs": [[0.5, 0.25]]}, [0.75 * log(2)]),
        ("reverse_kl", {}, [ODD], APART, [kl(ODD, EVEN)]),
        ("reverse_kl", {"least_prob": 1e-3}, [EVEN], {"target_probs": [[1.0, 0.0]]}, [-log(2) - 0.5 * log(1e-3)]),
        ("reverse_kl", {}, [EVEN], {"target_probs": [NOTHING]}, [0.0]),  # the target's can't be drafted
        ("jsd", {}, [FAR], APART, [(kl(EVEN, [0.3, 0.7]) + kl(FAR, [0.3, 0.7])) / 2]),
        ("jsd", {}, [EVEN], {"target_probs": [FAR]}, [(kl(EVEN, [0.3, 0.7]) + kl(FAR, [0.3, 0.7])) / 2]),
        ("jsd", {}, [[1e-30, 1.0]], {"target_probs": [[1.0, 0.0]]}, [log(2)]),  # as much as there is
        ("lk_hybrid", {}, [ODD], APART, [WEIGHT * KL + (1 - WEIGHT) * TV]),
        ("lk_hybrid", {"eta": 0.0}, [ODD], APART, [KL]),
        ("lk_hybrid", {"eta": 1000.0}, [ODD], APART, [TV]),
        ("log_acceptance", {}, [ODD], APART, [-log(0.75)]),
        ("total_variation", {}, [[0.2, 0.3, 0.5]], {"target_probs": [[0.5, 0.4, 0.1]]}, [0.4]),
        ("total_variation", {}, [EVEN], {"target_probs": [[0.3, 0.3]]}, [0.4]),  # the rest can't be drafted
        *(("feature_l2", {"classification": w}, [ODD, ODD], HINT, [2.5 + w * log(4), 2.5]) for w in (0.0, 0.5)),
        *(
            ("feature_regression", {"classification": w}, [EVEN], NEXT, [(0.125 + 1.5) / 2 + w * 0.75 * log(2)])
            for w in (0.0, 0.1)
        ),
        *(("attention_transfer", {"weight": w}, [EVEN] * 2, ATTENTION, [log(2) + w / 50] * 2) for w in (0.0, 50.0)),
        ("activation_boundary", {"weight": 2.0}, [EVEN], SIDES, [2.0 * (0.25 + 9.0 + 4.0) / 4]),
        ("activation_boundary", {}, [EVEN], STRONG, [0.0]),
        ("activation_boundary", {"margin": 3.0}, [EVEN], STRONG, [(4.0 + 4.0) / 3]),
        ("feature_mmd", {"weight": 8.0}, [EVEN] * 2, NEURONS, [2.0, 2.0]),
    ],
)
def test_rows_by_hand(name, params, q, columns, wanted) -> None:
    method = catalog.load("losses", name)
    told = method.loss(
        Drafted(torch.tensor(q).log(), **{key: torch.tensor(column) for key, column in columns.items()}),
        method.Params(**params),
    )
    torch.testing.assert_close(told, torch.tensor(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("beta", "wanted"), [(1e-3, kl(EVEN, FAR)), (1 - 1e-3, kl(FAR, EVEN))])
def test_the_ends_of_jsd_are_forward_and_reverse_kl_up_to_a_factor(beta: float, wanted: float) -> None:
    drafted = Drafted(torch.tensor([FAR]).log(), target_probs=torch.tensor([EVEN]))
    assert float(jsd.loss(drafted, jsd.Params(beta=beta))) / 1e-3 == pytest.approx(wanted, rel=0.01)


def hidden(name: str, draft: Tensor, target: Tensor, **params: float) -> Tensor:
    """Return what a loss makes of hidden states where the target says nothing."""
    method, none = catalog.load("losses", name), torch.zeros(len(draft), 3)
    return method.loss(
        Drafted(none, draft_hidden=draft, target_hidden=target, target_probs=none), method.Params(**params)
    )


def test_the_mean_over_rows_is_the_discrepancy_by_the_kernel() -> None:
    rng = torch.Generator().manual_seed(0)
    draft, target = (torch.randn(7, 5, generator=rng) for _ in range(2))
    s, t = (torch.nn.functional.normalize(states, dim=0) for states in (draft, target))
    wanted = sum(sign * (one.T @ other).square().mean() for sign, one, other in ((1, t, t), (1, s, s), (-2, t, s)))
    torch.testing.assert_close(hidden("feature_mmd", draft, target, weight=2.0).mean(), wanted)


def test_what_a_loss_does_not_compare_costs_nothing() -> None:
    """Attention transfer the strength of all entries alike; the discrepancy that of neurons, and their order."""
    target = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for name, draft in (
        ("attention_transfer", -3 * target),
        ("feature_mmd", (target * torch.tensor([2.0, -1.0, 0.5, 3.0])).flip(1)),
    ):
        torch.testing.assert_close(hidden(name, draft, target), torch.zeros(6), rtol=0, atol=1e-5)


def gradient(logits: Tensor, p: Tensor, **settings: float) -> Tensor:
    logits = logits.clone().requires_grad_()
    tvd_plus_plus.loss(Drafted(logits, target_probs=p), tvd_plus_plus.Params(**settings)).sum().backward()
    assert logits.grad is not None
    return logits.grad


def test_tvd_plus_pluss_gradient_is_that_of_total_variation_over_the_deviation_of_the_reward() -> None:
    rng = torch.Generator().manual_seed(1)
    p, logits = torch.randn(5, 7, generator=rng).softmax(-1), torch.randn(5, 7, generator=rng)
    free = logits.clone().requires_grad_()
    total_variation.loss(Drafted(free, target_probs=p), total_variation.Params()).sum().backward()
    q = logits.softmax(-1)
    kept = (q * (p > q)).sum(-1, keepdim=True)
    torch.testing.assert_close(gradient(logits, p), free.grad / (kept * (1 - kept)).sqrt())


def test_where_draft_and_target_agree_tvd_plus_plus_teaches_nothing() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]])
    assert float(gradient(p.log(), p).abs().max()) < 1e-3
