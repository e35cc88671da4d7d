"""Fused requests say what they say alone, and take what a clock that is known by hand says."""

import itertools
from pathlib import Path

import pytest
import torch

from models.layers.decoder import Cache
from models.layers.wide import WideDecoder
from models.systems import Given, flover
from models.systems.flover import Request
from tests.models.systems import planted

FIRST = [7, 11, 13, 17]
SECOND = [5, 9, 30]


@pytest.fixture(scope="module")
def decoder(tiny_target: Path) -> WideDecoder:
    return WideDecoder.load(tiny_target, torch.float32)


def passes(decoder: WideDecoder, requests: list[Request], max_batch: int, joins: bool) -> list[float]:
    """Return what each request takes where each pass takes a second."""
    answers = flover.serve(decoder, requests, max_batch, joins, itertools.count().__next__)
    return [answer.seconds for answer in answers]


def test_one_after_another_each_waits_for_all_before_it(decoder: WideDecoder) -> None:
    requests = [Request(FIRST, 3, 0.0)] * 3
    assert passes(decoder, requests, 1, joins=False) == [3, 6, 9]


def test_a_batch_shares_its_steps(decoder: WideDecoder) -> None:
    requests = [Request(FIRST, 3, 0.0)] * 3
    assert passes(decoder, requests, 3, joins=False) == [5, 5, 5]  # three prompts, then two steps
    assert passes(decoder, requests, 2, joins=False) == [4, 4, 7]  # the third finds no room


def test_who_comes_late_waits_for_a_batch_and_joins_what_is_fused(decoder: WideDecoder) -> None:
    requests = [Request(SECOND, 3, 1.5), Request(FIRST, 5, 0.0)]
    assert passes(decoder, requests, 2, joins=False) == [6.5, 5]
    assert passes(decoder, requests, 2, joins=True) == [3.5, 6]


def test_time_goes_on_to_the_next_arrival_where_nobody_runs(decoder: WideDecoder) -> None:
    assert passes(decoder, [Request(FIRST, 2, 0.0), Request(FIRST, 1, 100.0)], 2, joins=True) == [2, 1]


def test_fused_requests_say_what_each_says_alone(decoder: WideDecoder) -> None:
    requests = [Request([5 + number, *FIRST[: number + 1]], 12 - number, 1.3 * number) for number in range(4)]
    alone = [flover.serve(decoder, [request], 1, joins=False)[0].token_ids for request in requests]
    clock = itertools.count().__next__
    fused = flover.serve(decoder, requests, 3, joins=True, clock=clock)
    assert [answer.token_ids for answer in fused] == alone
    assert [len(said) for said in alone] == [12, 11, 10, 9]
    for request, said in zip(requests, alone, strict=True):
        assert said == plain(decoder, request)


def plain(decoder: WideDecoder, request: Request) -> list[int]:
    """Return what the decoder says when the whole text is read anew for each token."""
    text = list(request.prompt)
    for _ in range(request.num_tokens):
        states, _ = decoder.forward(torch.tensor(text), Cache(decoder, len(text)))
        text.append(int(decoder.logits(states[-1:]).argmax()))
    return text[len(request.prompt) :]


@pytest.mark.parametrize(
    ("request_", "max_batch", "said"),
    [
        (Request([], 3, 0.0), 1, "prompt of a token or more"),
        (Request(FIRST, 0, 0.0), 1, "answer of 1 or more"),
        (Request(FIRST, 3, 0.0), 0, "max_batch must be 1 or more, got 0"),
    ],
)
def test_nonsense_is_refused(decoder: WideDecoder, request_: Request, max_batch: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flover.serve(decoder, [request_], max_batch, joins=True)


def test_a_study_draws_the_same_requests_for_the_same_seed(decoder: WideDecoder) -> None:
    seen = flover.study(Given(decoder, [FIRST, SECOND], 8, planted.EASY), torch.Generator().manual_seed(0))
    assert seen.gain > 0 and seen.kept == 1
