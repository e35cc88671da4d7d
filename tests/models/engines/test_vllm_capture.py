"""What the worker holds of hidden states, without an engine."""

import time
from pathlib import Path

import pytest
import torch

from models.core.learning import captured
from models.engines.vllm import capture
from models.engines.vllm.capture import Claim, Ring

LAYERS, TARGET, MIB = (1, 2), "a" * 64, 1 << 20
IDS = torch.arange(100, 120)
STATES = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def note(ring: Ring, name: str, start: int, end: int) -> None:
    """Let a step compute the positions from `start` up to `end` of one request."""
    ring.note([name], [0, end - start], torch.arange(start, end), IDS[start:end], STATES[start:end])


def written(ring: Ring, file: Path, num_tokens: int) -> captured.Captured:
    before = ring.settle([Claim("a", str(file), num_tokens, TARGET)]).get("written", 0)
    deadline_s = time.monotonic() + 60
    while ring.settle([]).get("written", 0) == before:
        assert time.monotonic() < deadline_s, ring.settle([])
        time.sleep(0.005)
    return captured.read(file, TARGET, LAYERS, IDS[:num_tokens].tolist())


def test_a_requests_pieces_are_written_up_to_its_last_token_but_one(tmp_path: Path) -> None:
    ring = Ring(LAYERS, MIB)
    ring.note(["a", "", "b"], [0, 4, 6, 9], torch.tensor([0, 1, 2, 3, 7, 8, 0, 1, 2]), IDS[:9], STATES[:9])
    note(ring, "a", 4, 8)
    found = written(ring, tmp_path / "a", 8)  # a stop string cut the last step short
    assert found.first == 0
    assert torch.equal(found.states, STATES[:7])
    assert ring.settle([Claim("b")]) == {"written": 1, "not wanted": 1}


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_states_are_those_of_the_step_whatever_the_device_does_next(
    tmp_path: Path, device: str, dtype: torch.dtype
) -> None:
    ring, states = Ring(LAYERS, MIB), STATES.to(device, dtype, copy=True)
    ring.note(["a"], [0, 20], torch.arange(20, device=device), IDS.to(device), states)
    states.zero_()
    assert torch.equal(written(ring, tmp_path / "a", 20).states, STATES[:19])


def test_what_a_preempted_request_reads_anew_takes_the_place_of_what_it_had(tmp_path: Path) -> None:
    ring = Ring(LAYERS, MIB)
    note(ring, "a", 0, 6)
    note(ring, "a", 6, 10)
    note(ring, "a", 4, 12)
    assert torch.equal(written(ring, tmp_path / "a", 13).states, STATES[:12])


def test_only_what_came_after_a_gap_is_kept(tmp_path: Path) -> None:
    ring = Ring(LAYERS, MIB)
    note(ring, "a", 0, 4)
    note(ring, "a", 6, 12)
    found = written(ring, tmp_path / "a", 13)
    assert found.first == 6
    assert torch.equal(found.states, STATES[6:12])


def test_a_request_whose_end_is_missing_is_not_written(tmp_path: Path) -> None:
    ring = Ring(LAYERS, MIB)
    note(ring, "a", 0, 4)
    assert ring.settle([Claim("a", str(tmp_path / "a"), 12, TARGET)]) == {"incomplete": 1}
    assert ring.settle([Claim("a", str(tmp_path / "a"), 12, TARGET)]) == {"incomplete": 1, "gone": 1}
    assert not (tmp_path / "a").exists()


def test_memory_is_bounded_and_is_had_again(tmp_path: Path) -> None:
    ring = Ring(LAYERS, STATES[:12].nbytes)
    note(ring, "b", 0, 8)
    note(ring, "a", 0, 8)
    note(ring, "a", 8, 9)
    assert ring.settle([Claim("b"), Claim("a", str(tmp_path / "a"), 10, TARGET)]) == {"no memory": 1, "not wanted": 1}
    note(ring, "a", 0, 12)
    assert len(written(ring, tmp_path / "a", 13).states) == 12
    note(ring, "a", 0, 12)
    assert len(written(ring, tmp_path / "a", 13).states) == 12


def test_what_nobody_claims_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "UNCLAIMED_S", 0.02)
    ring = Ring(LAYERS, MIB)
    note(ring, "a", 0, 4)
    time.sleep(0.03)
    note(ring, "b", 0, 4)
    assert ring.settle([Claim("b")]) == {"unclaimed": 1, "not wanted": 1}


def test_a_folder_that_can_not_be_written_to_is_counted(tmp_path: Path) -> None:
    ring = Ring(LAYERS, MIB)
    note(ring, "a", 0, 4)
    ring.settle([Claim("a", str(tmp_path / "none" / "a"), 5, TARGET)])
    deadline_s = time.monotonic() + 60
    while not ring.settle([]):
        assert time.monotonic() < deadline_s
    assert ring.settle([]) == {"not writable": 1}
