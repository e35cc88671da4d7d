import math

import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from models.libraries.continuous import Emitted, Law, verify

NUM_BLOCKS, P_VALUE = 200_000, 1e-4


class Gaussian:
    """Independent coordinates of one width."""

    def __init__(self, mean: Tensor, scale: float) -> None:
        self.mean, self.scale = mean.double(), scale

    def log_density(self, blocks: Tensor, x: Tensor) -> Tensor:
        z = (x - self.mean[blocks]) / self.scale
        return (-0.5 * z**2 - math.log(self.scale * math.sqrt(2 * math.pi))).sum(dim=-1)

    def draw(self, blocks: Tensor, rng: torch.Generator) -> Tensor:
        mean = self.mean[blocks]
        return mean + self.scale * torch.randn(mean.shape, generator=rng, dtype=torch.float64)


def step(drafting: Law, q: Law, p: Law, seed: int = 0, **changes: int) -> Emitted:
    """One drafted token a block; `drafting` is what it is really drawn from."""
    rng, blocks = torch.Generator().manual_seed(seed), torch.arange(NUM_BLOCKS)
    drafted = drafting.draw(blocks, rng)[:, None]
    return verify(drafted, [q], [p, p], rng, **changes)


def normal(mean: float, scale: float = 1.0, width: int = 1) -> Gaussian:
    return Gaussian(torch.full((NUM_BLOCKS, width), mean), scale)


DRAFTS = {"far": normal(4.0), "wider": normal(0.5, 2.0), "narrower": normal(0.5, 0.5), "equal": normal(0.0)}


@pytest.mark.slow
@pytest.mark.parametrize("q", DRAFTS.values(), ids=DRAFTS)
def test_what_is_emitted_follows_the_target_whatever_the_draft_is(q: Gaussian) -> None:
    found = step(q, q, normal(0.0))
    assert kstest(found.tokens[:, 0, 0].numpy(), "norm").pvalue > P_VALUE
    after = found.tokens[found.num_accepted == 1, 1, 0]
    assert len(after) < 50 or kstest(after.numpy(), "norm").pvalue > P_VALUE


@pytest.mark.parametrize("distance", [0.0, 0.3, 2.0])
def test_as_much_is_kept_as_can_be_and_a_step_takes_one_draw_on_average(distance: float) -> None:
    found = step(normal(distance), normal(distance), normal(0.0))
    apart = math.erf(distance / (2 * math.sqrt(2)))  # total variation of two Gaussians of one width
    error = 4.5 * 0.5 / math.sqrt(NUM_BLOCKS)
    assert float(found.num_accepted.double().mean()) == pytest.approx(1 - apart, abs=error)
    if distance:
        tries = found.num_tries.double()
        assert float(tries.mean()) == pytest.approx(1, abs=4.5 * float(tries.std()) / math.sqrt(NUM_BLOCKS))
        assert ((found.num_tries > 0) == (found.num_accepted == 0)).all()
    else:
        assert not found.num_tries.any()


@pytest.mark.parametrize(
    "fault",
    [
        {"drafting": normal(0.6), "q": normal(0.0), "p": normal(0.3)},  # the draft lies about q
        {"drafting": normal(0.6), "q": normal(0.6), "p": normal(0.3), "most_tries": 1},  # of p, not what is left
        {"drafting": normal(0.6), "q": normal(0.6, 1.1), "p": normal(0.3)},  # q of other settings
    ],
)
def test_a_planted_bug_breaks_the_law(fault: dict) -> None:
    found = step(**fault).tokens[:, 0, 0] - 0.3
    assert kstest(found.numpy(), "norm").pvalue < P_VALUE


@pytest.mark.slow
def test_a_chain_follows_the_target_at_every_place() -> None:
    """Each number is half of the one before it, and a shift that draft and target have different ideas of."""
    rng, blocks, num_drafted = torch.Generator().manual_seed(1), torch.arange(NUM_BLOCKS), 3
    before, drafted, q, p = torch.zeros(NUM_BLOCKS, 2).double(), [], [], []
    for _ in range(num_drafted):
        q.append(Gaussian(0.5 * before + 0.4, 1.2))
        p.append(Gaussian(0.5 * before, 1.0))
        before = q[-1].draw(blocks, rng)
        drafted.append(before)
    p.append(Gaussian(0.5 * before, 1.0))
    found = verify(torch.stack(drafted, dim=1), q, p, rng)
    assert set(found.num_accepted.tolist()) == {0, 1, 2, 3}
    assert torch.equal((~found.tokens[..., 0].isnan()).sum(dim=1), found.num_accepted + 1)
    said, noise = torch.zeros(NUM_BLOCKS, 2).double(), []
    for place in range(num_drafted + 1):
        # Blocks that end before go on as the target would, so that all are as long.
        went_on = 0.5 * said + torch.randn(said.shape, generator=rng, dtype=torch.float64)
        now = torch.where((found.num_accepted >= place)[:, None], found.tokens[:, place], went_on)
        noise.append(now - 0.5 * said)
        said = now
    together = torch.stack(noise, dim=1).flatten(1)
    assert all(kstest(one.numpy(), "norm").pvalue > P_VALUE for one in together.T)
    correlation = torch.corrcoef(together.T) - torch.eye(together.shape[1])
    assert float(correlation.abs().max()) < 5 / math.sqrt(NUM_BLOCKS)


def test_nothing_drafted_is_one_token_of_the_target() -> None:
    found = verify(torch.empty(5, 0, 2), [], [Gaussian(torch.zeros(5, 2), 1.0)], torch.Generator().manual_seed(0))
    assert found.tokens.shape == (5, 1, 2) and not found.tokens.isnan().any()
    assert found.num_accepted.tolist() == [0] * 5


def test_what_does_not_fit_is_refused() -> None:
    law, rng = Gaussian(torch.zeros(2, 1), 1.0), torch.Generator()
    with pytest.raises(ValueError, match=r"K \+ 1 laws p; got \[2, 1, 1\], 1 and 1"):
        verify(torch.zeros(2, 1, 1), [law], [law], rng)
    with pytest.raises(ValueError, match=r"wanted drafted \[B, K, W\]"):
        verify(torch.zeros(2, 1), [law], [law, law], rng)
    with pytest.raises(ValueError, match="drafted token 1 of a block no density"):
        verify(torch.full((2, 1, 1), torch.inf), [law], [law, law], rng)
    with pytest.raises(ValueError, match="most_tries must be at least 1, got 0"):
        verify(torch.zeros(2, 1, 1), [law], [law, law], rng, most_tries=0)
