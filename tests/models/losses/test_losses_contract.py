"""Every loss: least where it says it is, reached by descent, finite, and each row by itself."""

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor

from models import catalog
from models.core.drafting.draft_families import family_named
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import Procedure, ngram
from models.losses import Drafted, Minimum, cross_entropy
from tests.models.drafts.answered import answers_of, prompts
from tests.models.drafts.tiny import make_tiny

OF_ALL_ROWS = {"hidden neurons"}  # where this is least, rows depend on each other
N, D, H, K = 6, 5, 4, 3


@pytest.fixture(params=catalog.names("losses"))
def method(request: pytest.FixtureRequest) -> ModuleType:
    return catalog.load("losses", request.param)


def columns(seed: int = 0) -> dict[str, Tensor]:
    """All columns of six rows; of one of them the token that came is none of the draft's."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "draft_logits": torch.randn(N, D, generator=rng),
        "target_probs": torch.randn(N, D, generator=rng).softmax(-1),
        "token": torch.tensor([0, 4, 2, -1, 1, 2]),
        "draft_hidden": torch.randn(N, H, generator=rng),
        "target_hidden": torch.randn(N, H, generator=rng),
    }


def value(method: ModuleType, known: dict[str, Tensor]) -> Tensor:
    needed = {name: known[name] for name in method.NEEDS}
    return method.loss(Drafted(known["draft_logits"], **needed), method.Params())


def at_minimum(method: ModuleType, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns where the loss says that it is least."""
    least = dict(known)
    for kind in method.MINIMUM:
        if kind == "distribution":
            least["draft_logits"] = known["target_probs"].log()
        elif kind == "token":
            least["draft_logits"] = 40.0 * torch.nn.functional.one_hot(known["token"].clamp(min=0), D)
        elif kind == "hidden":
            least["draft_hidden"] = known["target_hidden"].clone()
        elif kind == "hidden signs":
            least["draft_hidden"] = 40.0 * known["target_hidden"].sign()
        else:
            least["draft_hidden"] = known["target_hidden"].flip(1)
    return least


def test_a_loss_says_what_it_reads_and_where_it_is_least(method: ModuleType) -> None:
    assert method.PAPER
    assert set(method.NEEDS) <= columns().keys() - {"draft_logits"}
    assert set(method.MINIMUM) <= set(get_args(Minimum))
    assert value(method, columns()).shape == (N,)


def test_it_is_nowhere_less_than_where_it_says(method: ModuleType) -> None:
    if not method.MINIMUM:
        return
    best = value(method, at_minimum(method, columns()))
    for seed in range(20):
        other = {**columns(), **{name: columns(seed)[name] for name in ("draft_logits", "draft_hidden")}}
        if OF_ALL_ROWS.intersection(method.MINIMUM):
            assert value(method, other).sum() >= best.sum() - 1e-6
        else:
            assert (value(method, other) >= best - 1e-6).all()


def test_descent_ends_where_it_says(method: ModuleType) -> None:
    known = columns()
    leaves = [known[name].requires_grad_() for name in ("draft_logits", "draft_hidden")]
    optimizer = torch.optim.Adam(leaves, lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1 - done / 600)
    for _ in range(600):
        optimizer.zero_grad()
        value(method, known).sum().backward()
        optimizer.step()
        schedule.step()
    q = known["draft_logits"].detach().softmax(-1)
    if "distribution" in method.MINIMUM:
        torch.testing.assert_close(q, known["target_probs"], atol=0.02, rtol=0)
    if "token" in method.MINIMUM:
        came = known["token"] >= 0
        assert (q[came].gather(-1, known["token"][came][:, None]) > 0.95).all()
    if "hidden signs" in method.MINIMUM:
        assert torch.equal(known["draft_hidden"].sign(), known["target_hidden"].sign())
    if "hidden" in method.MINIMUM:
        torch.testing.assert_close(known["draft_hidden"].detach(), known["target_hidden"], atol=0.02, rtol=0)


def test_values_and_gradients_are_finite_at_the_edges(method: ModuleType) -> None:
    known = columns()
    known["draft_logits"] = (60.0 * torch.nn.functional.one_hot(torch.arange(N) % D, D)).float()
    known["target_probs"] = torch.nn.functional.one_hot((torch.arange(N) + 1) % D, D).float()
    known["target_probs"][0] = 0.0  # all of the target's mass lies where the draft can't propose
    known["draft_hidden"] = known["target_hidden"].clone()
    for name in ("draft_logits", "draft_hidden"):
        known[name].requires_grad_()
    values = value(method, known)
    assert bool(torch.isfinite(values).all())
    values.sum().backward()
    for name in ("draft_logits", "draft_hidden"):
        gradient = known[name].grad
        assert gradient is None or bool(torch.isfinite(gradient).all()), name


def test_rows_do_not_depend_on_each_other(method: ModuleType) -> None:
    if OF_ALL_ROWS.intersection(method.MINIMUM):
        return
    known = columns()
    alone = torch.cat([value(method, {name: column[n : n + 1] for name, column in known.items()}) for n in range(N)])
    torch.testing.assert_close(alone, value(method, known))


@pytest.mark.parametrize(
    ("logits", "others"),
    [
        (torch.zeros(2, 3), {"target_probs": torch.zeros(2, 2)}),
        (torch.zeros(2, 3), {"token": torch.zeros(3)}),
        (torch.zeros(2, 3), {"draft_hidden": torch.zeros(2, 4), "target_hidden": torch.zeros(2, 5)}),
    ],
)
def test_columns_that_do_not_fit_are_refused(logits: Tensor, others: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="does not fit the other columns"):
        Drafted(logits, **others)


def test_what_a_loss_does_not_say_it_reads_is_not_there() -> None:
    with pytest.raises(AttributeError, match="target_probs"):
        _ = Drafted(torch.zeros(2, 3)).target_probs


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    return answers_of(tiny_target, prompts(12))


@pytest.mark.parametrize("follow", ["accepted", "all"])
def test_the_loop_fills_the_columns_with_what_came_and_what_the_target_says(
    follow: str, tiny_target: Path, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Drafted] = []
    compute = cross_entropy.loss
    monkeypatch.setattr(cross_entropy, "NEEDS", tuple(columns().keys() - {"draft_logits"}))
    monkeypatch.setattr(cross_entropy, "loss", lambda drafted, params: seen.append(drafted) or compute(drafted, params))
    draft = make_tiny(family_named("eagle3"), tiny_target)
    settings = {"num_epochs": 1, "batch_tokens": 10_000, "num_threads": 1}  # one batch
    params = distill.Params(loss={"name": "cross_entropy"}, follow=follow, **settings)
    distill.train(draft, tiny_target, samples, params, K, tmp_path)
    assert len(seen) == K or follow == "accepted"
    for earlier, later in pairwise(seen):
        right = int((earlier.draft_logits.argmax(-1) == earlier.token).sum())
        assert (len(later.token) <= right) == (follow == "accepted")
    for drafted in seen:
        known = drafted.token >= 0
        # The answers are greedy, and states are kept in bfloat16.
        said = drafted.target_probs[known].argmax(-1) == drafted.token[known]
        assert known.any()
        assert said.float().mean() > 0.9
        assert drafted.target_hidden.shape == drafted.draft_hidden.shape == (len(known), 128)


def test_a_loss_on_hidden_states_refuses_a_draft_that_has_none(tiny_target, samples, tmp_path) -> None:
    class Learning(ngram.Ngram):
        """Prompt lookup with something to learn, so that the loop takes it."""

        procedure = Procedure(cross_entropy.Params())

        def __init__(self, draft: ngram.Ngram) -> None:
            super().__init__(draft.params, draft.config)
            self.weight = torch.nn.Parameter(torch.zeros(1))

    draft = Learning(ngram.create(ngram.Params(min_tokens=1), tiny_target, torch.zeros(1).numpy()))
    with pytest.raises(ValueError, match='loss "feature_l2" reads draft_hidden, and this draft has none'):
        distill.train(draft, tiny_target, samples, distill.Params(loss={"name": "feature_l2"}), K, tmp_path)
