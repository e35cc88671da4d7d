"""Flover: the token steps of all requests that run are fused into one, and a request joins at the step it arrives in.

Reading a prompt and saying tokens are taken apart: a prompt is read alone, and from then on the request is a row of the
one step that all share. A finished request leaves at once and its cache with it, so rows stay dense; the paper reorders
a common buffer for that, here each request has a cache of its own. The weights are read once a step for all rows, where
requests that are served one after another read them once a token each.

The plain ways: one request after another, and dynamic batching, which takes all who wait, and lets nobody join until
the longest of them is finished. Steps run and are timed; only waiting for arrivals is skipped, on a clock of its own.
"""

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from models.layers.decoder import Cache
from models.layers.wide import WideDecoder
from models.systems import Given, Seen

PAPER = "arXiv:2305.13484, sections III and IV"
CLAIM = "over 11× (GPT) and 16× (Llama) faster than FasterTransformer when requests arrive at random"
GAIN = "mean seconds from a request's arrival to its last token, one request after another / fused"
KEPT = "outputs that are the same token by token"
SHAPE = "fused requests end sooner than one after another, and than in batches that nobody joins; all outputs stay"
NEEDS = ""
NUM_REQUESTS, MAX_BATCH = 8, 8
GAP_STEPS = 2.0  # mean steps of a single request between two arrivals
SHORTEST = 0.25  # answers are from this share of the longest up to it


class Request(NamedTuple):
    """What is asked, and when.

    Attributes:
        num_tokens: of its answer, at least 1.
    """

    prompt: list[int]
    num_tokens: int
    arrives_s: float


class Answer(NamedTuple):
    """What was said, and how long after the arrival the last token came."""

    token_ids: list[int]
    seconds: float


@torch.inference_mode()
def serve(
    decoder: WideDecoder,
    requests: Sequence[Request],
    max_batch: int,
    joins: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Answer]:
    """Answer requests greedily, in the order of their arrival.

    Args:
        decoder: the model.
        requests: in any order.
        max_batch: how many run at once; 1 is one after another.
        joins: whether a request may join those that run; else it waits until all of them are finished.
        clock: seconds; asked before and after each pass.

    Raises:
        ValueError: a request has no prompt or asks for no token, or nothing may run.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch must be 1 or more, got {max_batch}")
    if any(not request.prompt or request.num_tokens < 1 for request in requests):
        raise ValueError("each request needs a prompt of a token or more, and an answer of 1 or more")
    waiting = sorted(range(len(requests)), key=lambda number: requests[number].arrives_s)
    running: list[_Running] = []
    answers: dict[int, Answer] = {}
    now = 0.0
    while waiting or running:
        if not running:
            now = max(now, requests[waiting[0]].arrives_s)
        started = clock()
        if waiting and len(running) < max_batch and _may_enter(requests[waiting[0]], running, joins, now):
            running.append(_read(decoder, waiting[0], requests[waiting.pop(0)]))
        else:
            _step(decoder, running)
        now += clock() - started
        for one in [one for one in running if len(one.token_ids) == requests[one.number].num_tokens]:
            answers[one.number] = Answer(one.token_ids, now - requests[one.number].arrives_s)
            running.remove(one)
    return [answers[number] for number in range(len(requests))]


def study(given: Given, rng: torch.Generator) -> Seen:
    """Serve the same requests in the three ways; see `models.systems`.

    Args:
        given: requests take its prompts in turn, and answers are of up to its `num_tokens`.
        rng: draws arrivals and lengths.
    """
    step_s = _step_s(given)
    gaps = torch.empty(NUM_REQUESTS).exponential_(1.0, generator=rng) * GAP_STEPS * step_s
    shortest = max(1, round(SHORTEST * given.num_tokens))
    lengths = torch.randint(shortest, given.num_tokens + 1, (NUM_REQUESTS,), generator=rng).tolist()
    requests = [
        Request(given.prompts[number % len(given.prompts)], length, arrives_s)
        for number, (length, arrives_s) in enumerate(zip(lengths, gaps.cumsum(0).tolist(), strict=True))
    ]
    single = serve(given.decoder, requests, 1, joins=False)
    batched, fused = (serve(given.decoder, requests, MAX_BATCH, joins) for joins in (False, True))
    one_s, batch_s, fused_s = (fmean(answer.seconds for answer in answers) for answers in (single, batched, fused))
    kept = fmean(one.token_ids == other.token_ids for one, other in zip(single, fused, strict=True))
    return Seen(one_s / fused_s, kept, fused_s < min(one_s, batch_s) and kept == 1)


class _Running(NamedTuple):
    number: int
    cache: Cache
    token_ids: list[int]


def _may_enter(request: Request, running: Sequence[_Running], joins: bool, now: float) -> bool:
    """Whether a request has arrived, and finds nobody or only such as have said their first token alone."""
    if request.arrives_s > now:
        return False
    return joins or all(len(one.token_ids) == 1 for one in running)


def _read(decoder: WideDecoder, number: int, request: Request) -> _Running:
    cache = Cache(decoder, len(request.prompt) + request.num_tokens)
    states, _ = decoder.forward(torch.tensor(request.prompt, device=decoder.device), cache)
    return _Running(number, cache, decoder.logits(states[-1:]).argmax(-1).tolist())


def _step(decoder: WideDecoder, running: Sequence[_Running]) -> None:
    """Say one more token of each."""
    last = torch.tensor([one.token_ids[-1] for one in running], device=decoder.device)
    said = decoder.logits(decoder.together(last, [one.cache for one in running])).argmax(-1).tolist()
    for one, token in zip(running, said, strict=True):
        one.token_ids.append(token)


@torch.inference_mode()
def _step_s(given: Given) -> float:
    """Return what a step of a single request takes here, after a first one that warms up."""
    running = _read(given.decoder, 0, Request(given.prompts[0], 5, 0.0))
    times = []
    for _ in range(4):
        started = time.perf_counter()
        _step(given.decoder, [running])
        times.append(time.perf_counter() - started)
    return median(times[1:])
