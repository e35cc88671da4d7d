from pathlib import Path

import pytest
import torch

from models.core.layers.decoder import Cache, WideDecoder
from models.systems import Given, flover
from models.systems.flover import Answer, Request
from tests.models.systems import planted

FIRST = [7, 11, 13, 17]
SECOND = [5, 9, 30]


@pytest.fixture(scope="module")
def decoder(tiny_target: Path) -> WideDecoder:
    return WideDecoder.load(tiny_target, torch.float32)


def a_second(num_sequences: int, num_tokens: int) -> float:
    """Each pass takes a second."""
    return 1.0


THREE = [Request(FIRST, 3, 0.0)] * 3
LATE = [Request(SECOND, 3, 1.5), Request(FIRST, 5, 0.0)]
IDLE = [Request(FIRST, 2, 0.0), Request(FIRST, 1, 100.0)]


@pytest.mark.parametrize(
    ("requests", "size", "fused", "wanted"),
    [
        (THREE, 1, False, [3, 6, 9]),
        (THREE, 3, False, [5, 5, 5]),  # three prompts, then two steps
        (THREE, 2, False, [4, 4, 7]),  # the third finds no room
        (LATE, 2, False, [6.5, 5]),
        (LATE, 2, True, [3.5, 6]),
        (IDLE, 2, True, [2, 1]),
    ],
    ids=["in turn", "a batch", "a smaller batch", "late for a batch", "late for what is fused", "nobody runs"],
)
def test_what_requests_take_by_hand(requests: list[Request], size: int, fused: bool, wanted: list[float]) -> None:
    assert flover.seconds(requests, size, fused, a_second) == wanted


def test_a_pass_takes_what_its_shape_does() -> None:
    requests = [Request(FIRST, 2, 0.0), Request(SECOND, 2, 0.0)]
    # Prompts of 4 and of 3 tokens, then one step of two sequences.
    assert flover.seconds(requests, 2, True, lambda sequences, tokens: 10.0 * sequences + tokens) == [48, 48]


def test_fused_requests_say_what_each_says_alone(decoder: WideDecoder) -> None:
    requests = [Request([5 + number, *FIRST[: number + 1]], 12 - number, 1.3 * number) for number in range(4)]
    alone = [flover.serve(decoder, [request], 1, False, a_second)[0] for request in requests]
    fused = flover.serve(decoder, requests, 3, True, a_second)
    assert [answer.token_ids for answer in fused] == [answer.token_ids for answer in alone]
    assert [len(said.gaps) for said in alone] == [12, 11, 10, 9]
    for request, said in zip(requests, alone, strict=True):
        assert said.token_ids == plain(decoder, request)


def plain(decoder: WideDecoder, request: Request) -> list[int]:
    """Return what the decoder says when the whole text is read anew for each token."""
    text = list(request.prompt)
    for _ in range(request.num_tokens):
        states, _ = decoder.forward(torch.tensor(text), Cache(decoder, len(text)))
        text.append(int(decoder.logits(states[-1:]).argmax()))
    return text[len(request.prompt) :]


def test_an_output_may_part_at_a_near_tie_and_nowhere_else() -> None:
    request, said = Request(FIRST, 3, 0.0), Answer([5, 6, 7], [1.0, 1e-5, 1.0])
    assert flover._same(request, said, said)
    assert flover._same(request, said, said._replace(token_ids=[5, 9, 9]))
    assert not flover._same(request, said, said._replace(token_ids=[9, 6, 7]))


@pytest.mark.slow
@pytest.mark.parametrize(("at_eight", "holds"), [(2.0, True), (8.0, False)])
def test_the_verdict_follows_from_what_a_step_of_eight_rows_takes(
    decoder: WideDecoder, at_eight: float, holds: bool
) -> None:
    """Where eight rows take as long as eight steps nothing is gained, so that the claim must not be seen."""

    def takes(num_sequences: int, num_tokens: int) -> float:
        return 1 + (at_eight - 1) * (num_sequences - 1) / 7

    given = Given(decoder, [FIRST, SECOND], 12, planted.EASY)
    seen = [flover.compare(given, takes, torch.Generator().manual_seed(seed)) for seed in range(2)]
    assert [one.holds for one in seen] == [holds] * 2
    assert all((one.gain > 1.3) is holds and one.kept == 1 for one in seen)


def test_a_study_times_the_passes_of_this_machine(decoder: WideDecoder) -> None:
    given = Given(decoder, [FIRST, SECOND], 8, planted.EASY)
    seen = flover.study(given, torch.Generator().manual_seed(0))
    assert seen.gain > 0 and seen.kept == 1
