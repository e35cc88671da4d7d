"""All machines have equal weights after each step, whatever their data are, and they learn from each other's bytes."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

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


def gains(model: torch.nn.Module) -> dict[str, Tensor]:
    """The scales of the norms: few enough."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.ndim == 1}


def learn(number: int, target: Path, other: Connection, result: Connection) -> None:
    """Run one of two machines."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    token_ids = torch.tensor([[3 + (number + 3 * place) % 60 for place in range(24)]])

    def loss(step: int) -> float:
        return float(model(input_ids=token_ids, labels=token_ids, use_cache=False).loss)

    sent = []

    def exchange(step: int, byte: int) -> list[int]:
        other.send_bytes(bytes([byte]))
        sent.append(byte)
        theirs = other.recv_bytes()
        assert len(theirs) == 1
        return [byte, theirs[0]] if number == 0 else [theirs[0], byte]

    trained = gains(model)
    one = Machine(trained, loss, number, 2, Learning(learning_rate=0.1))
    with torch.no_grad():
        first = loss(0)
        one.learn(30, exchange)
        result.send((os.getpid(), {name: weight.tolist() for name, weight in trained.items()}, first, loss(0), sent))


@pytest.mark.slow
def test_two_processes_that_send_a_byte_a_step_have_one_model_and_it_learns(tiny_target: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ends, results = spawn.Pipe(), [spawn.Pipe(duplex=False) for _ in range(2)]
    other = spawn.Process(target=learn, args=(1, tiny_target, ends[1], results[1][1]))
    other.start()
    learn(0, tiny_target, ends[0], results[0][1])
    found = [receive.recv() for receive, _ in results]
    other.join()
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
    plain = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    assert found[0][1] != {name: weight.tolist() for name, weight in gains(plain).items()}
    assert found[0][4] != found[1][4]  # their data are not the same
    assert all(after < before for _, _, before, after, _ in found)


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
