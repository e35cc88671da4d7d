from pathlib import Path

import pytest
import torch

from models.core.learning.captured import Captures, read, write
from models.core.learning.hidden import HiddenStates, Sample

TARGET, LAYERS, TOKENS = "a" * 64, (1, 2), list(range(10, 19))
STATES = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)  # of positions 2 to 7


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """States of an answer of nine tokens; the cache gave the first two and the last was never read."""
    file = tmp_path / "one.states"
    write(file, TARGET, LAYERS, 2, TOKENS[2:8], STATES)
    return file


def test_what_was_written_is_read_and_only_its_owner_may(file: Path) -> None:
    found = read(file, TARGET, LAYERS, TOKENS)
    assert found.first == 2
    assert torch.equal(found.states, STATES)
    assert torch.equal(read(file, TARGET, (2,), TOKENS).states, STATES[:, 4:])  # of one of the layers
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("target", "layers", "tokens", "why"),
    [
        ("b" * 64, LAYERS, TOKENS, "of another target"),
        (TARGET, (1, 3), TOKENS, "of other layers"),
        (TARGET, LAYERS, [*TOKENS[:4], 99, *TOKENS[5:]], "of other tokens"),
        (TARGET, LAYERS, [*TOKENS, 99], "of other tokens"),
    ],
)
def test_states_of_something_else_are_refused(file: Path, target: str, layers: tuple, tokens: list, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(file, target, layers, tokens)


@pytest.mark.parametrize("damage", ["emptied", "cut", "flipped", "not a header", "no line"])
def test_a_damaged_file_is_refused(file: Path, damage: str) -> None:
    content = file.read_bytes()
    body = content.index(b"\n") + 1
    damaged = {
        "emptied": b"",
        "cut": content[:-3],
        "flipped": content[:body] + bytes([content[body] ^ 1]) + content[body + 1 :],
        "not a header": b'{"format": 1}\n' + content[body:],
        "no line": bytes(20_000),
    }
    file.write_bytes(damaged[damage])
    with pytest.raises(ValueError, match="corrupt"):
        read(file, TARGET, LAYERS, TOKENS)


def test_extraction_takes_what_was_captured_and_runs_the_target_for_the_rest(tiny_target: Path, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 67, (length,), generator=rng).tolist() for length in (30, 30, 26, 22)]
    ids[1][:8] = ids[0][:8]  # what begins alike is read once
    samples = [Sample(str(number), "chat", one[:12], one[12:]) for number, one in enumerate(ids)]
    computed = HiddenStates(tmp_path / "computed", samples, LAYERS, 128)
    computed.extract(tiny_target)

    for number, first in enumerate([8, 8, 0]):
        states = computed.read(samples[number])[0][first:-1]
        write(tmp_path / f"{number}.states", TARGET, LAYERS, first, ids[number][first:-1], states)
    (tmp_path / "2.states").write_bytes(b"torn")
    captures = Captures(lambda row_id: tmp_path / f"{row_id}.states", TARGET)
    taken = HiddenStates(tmp_path / "taken", samples, LAYERS, 128)
    taken.extract(tiny_target, captured=captures)

    assert captures.counts == {"captured": 2, "corrupt": 1, "missing": 1}
    for sample in samples:
        (states, sums), (wanted, wanted_sums) = taken.read(sample), computed.read(sample)
        off = (states[:-1].float() - wanted[:-1].float()).norm(dim=1) / wanted[:-1].float().norm(dim=1)
        assert float(off.max()) < 0.02
        torch.testing.assert_close(sums[:-1], wanted_sums[:-1], rtol=0.02, atol=0.05)
    again = HiddenStates(tmp_path / "taken", samples, LAYERS, 128)
    again.extract(tiny_target)
    assert torch.equal(again.read(samples[0])[0], taken.read(samples[0])[0])
