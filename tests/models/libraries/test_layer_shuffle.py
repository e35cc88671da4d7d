import pytest
import torch
from torch import Tensor

from models.libraries.layer_shuffle import Layer, forward, probabilities, shuffled

STATES = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))


def scan(states: Tensor) -> Tensor:
    """Each token's state with what came before it, as a state-space layer would see it."""
    return states + states.cumsum(dim=1) / 9


def by_token(states: Tensor) -> Tensor:
    """Each token by itself."""
    return states + states.tanh()


def drawn(layers: list[Layer], most: float, seed: int) -> Tensor:
    return forward(layers, STATES, most, torch.Generator().manual_seed(seed))


def test_a_scan_reads_the_other_order_and_what_it_says_is_put_back() -> None:
    states = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1)
    told = shuffled(lambda read: read.cumsum(dim=1), states, torch.tensor([2, 0, 1]))
    assert told.flatten().tolist() == [101, 111, 100]  # 100, then 1, then 10 were read


def test_putting_back_is_the_exact_inverse() -> None:
    for seed in range(5):
        order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(shuffled(lambda read: read, STATES, order), STATES)
        assert torch.equal(shuffled(by_token, STATES, order), by_token(STATES))


def test_without_probability_or_out_of_training_it_is_the_plain_way() -> None:
    plain = scan(scan(STATES))
    assert torch.equal(drawn([scan, scan], 0.0, 1), plain)
    assert torch.equal(forward([scan, scan], STATES, 1.0, None), plain)


def test_the_last_of_layers_that_always_shuffles_changes_what_a_scan_says_and_nothing_else() -> None:
    assert not torch.allclose(drawn([scan], 1.0, 1), scan(STATES))
    torch.testing.assert_close(drawn([by_token] * 3, 1.0, 1), by_token(by_token(by_token(STATES))))


def test_layers_shuffle_as_often_as_their_depth_says() -> None:
    assert probabilities(4, 0.6) == pytest.approx([0.15, 0.3, 0.45, 0.6])
    counts, runs = [0, 0, 0, 0], 3000
    rng = torch.Generator().manual_seed(0)
    tokens = torch.arange(40.0).view(1, 40, 1)

    def watched(number: int) -> Layer:
        def layer(states: Tensor) -> Tensor:
            counts[number] += not torch.equal(states, tokens)
            return states

        return layer

    for _ in range(runs):
        forward([watched(number) for number in range(4)], tokens, 0.6, rng)
    # Five standard errors of a share: beyond at 6e-7.
    for count, chance in zip(counts, probabilities(4, 0.6), strict=True):
        assert abs(count / runs - chance) < 5 * (chance * (1 - chance) / runs) ** 0.5


def test_it_is_seeded_and_learns_through_the_order() -> None:
    assert torch.equal(drawn([scan] * 4, 0.5, 7), drawn([scan] * 4, 0.5, 7))
    states = STATES.double().requires_grad_(True)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda read: shuffled(scan, read, order), (states,))


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"most must be from 0 to 1, got 1\.5"):
        forward([scan], STATES, 1.5, None)
    with pytest.raises(ValueError, match="each of 9 places once, got 3 numbers"):
        shuffled(scan, STATES, torch.tensor([0, 1, 1]))
