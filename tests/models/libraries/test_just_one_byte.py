import pytest
import torch
from torch import Tensor

from models.libraries.just_one_byte import Learning, Machine, from_byte, to_byte

SIZE, NUM_MACHINES = 6, 3
LEARNING = Learning(learning_rate=0.02)


def test_bytes_are_known_by_hand() -> None:
    assert [to_byte(value) for value in (0.0, 1.0, -1.0, 2.0, 1e9, -1e9, 1e-9)] == [0, 64, 192, 72, 127, 255, 0]
    assert [from_byte(byte) for byte in (0, 64, 192, 72, 128)] == [0, 1, -1, 2, 0]


def test_every_byte_comes_back_and_what_is_between_is_near() -> None:
    assert all(to_byte(from_byte(byte)) == byte for byte in range(256) if byte != 128)  # 128 is another 0
    for value in torch.logspace(-2.3, 2.3, 200).tolist():
        assert from_byte(to_byte(value)) == pytest.approx(value, rel=0.045)
        assert from_byte(to_byte(-value)) == pytest.approx(-value, rel=0.045)


def far(weights: Tensor, number: int) -> float:
    """A machine's own loss: how far the weights are from a place of its own; the mean of all places is 2."""
    place = 2.0 + (number - 1) * torch.linspace(-1, 1, SIZE)
    return float(((weights - place) ** 2).sum())


def machine(number: int, learning: Learning = LEARNING) -> tuple[Machine, Tensor]:
    weights = torch.zeros(SIZE)
    return Machine({"weights": weights}, lambda step: far(weights, number), number, NUM_MACHINES, learning), weights


def test_together_they_find_what_is_best_for_all_and_are_equal_all_the_way() -> None:
    machines = [machine(number) for number in range(NUM_MACHINES)]
    for _ in range(400):
        said = [one.say() for one, _ in machines]
        for one, _ in machines:
            one.hear(said)
        assert all(torch.equal(weights, machines[0][1]) for _, weights in machines)
    assert float((machines[0][1] - 2).abs().max()) < 0.4
    assert far(machines[0][1], 1) < 0.02 * far(torch.zeros(SIZE), 1)


def test_a_step_is_known_by_hand() -> None:
    one, weights = machine(0)
    ways = [one._direction(number)[0] for number in range(NUM_MACHINES)]
    one.hear([64, 0, 200])  # 1, 0 and −2
    torch.testing.assert_close(weights, -0.02 / 3 * (ways[0] - 2 * ways[2]))
    assert not torch.equal(one._direction(0)[0], ways[0])  # each step has its own


def test_saying_changes_no_bit() -> None:
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    before = weights.clone()
    Machine({"weights": weights}, lambda step: float(weights.sum()), 0, 1, LEARNING).say()
    assert torch.equal(weights, before)


def test_who_comes_late_steps_through_what_was_said() -> None:
    (first, weights), (other, _), (third, _) = (machine(number) for number in range(NUM_MACHINES))
    log = []
    for _ in range(20):
        log.append([one.say() for one in (first, other, third)])
        for one in (first, other, third):
            one.hear(log[-1])
    late, own = machine(2)
    for said in log:
        late.hear(said)
    assert torch.equal(own, weights) and late.step == 20


def test_what_machines_exchange_is_a_byte_a_step_and_what_they_learn_what_was_said_and_heard() -> None:
    (one, weights), (other, wanted) = machine(0), machine(0)
    heard, sent = [[40, step * 7 % 256] for step in range(30)], []

    def exchange(step: int, byte: int) -> list[int]:
        sent.append(byte)
        return [byte, *heard[step]]

    one.learn(30, exchange)
    for step in range(30):
        other.hear([other.say(), *heard[step]])
    assert torch.equal(weights, wanted) and one.step == 30
    assert len(sent) == 30 and all(0 <= byte <= 255 for byte in sent)


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted tensors to train, got none"):
        Machine({}, lambda step: 0.0, 0, 1, LEARNING)
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        Machine({"weights": torch.zeros(1)}, lambda step: 0.0, 2, 2, LEARNING)
    one, weights = machine(0)
    with pytest.raises(ValueError, match=r"a byte of each of 3 machines, got \[1, 2\]"):
        one.hear([1, 2])
    with pytest.raises(ValueError, match=r"got \[1, 2, 256\]"):
        one.hear([1, 2, 256])
    assert not weights.any() and one.step == 0
    with pytest.raises(FloatingPointError, match="machine 0, step 0"):
        Machine({"weights": torch.zeros(1)}, lambda step: float("nan"), 0, 1, LEARNING).say()
