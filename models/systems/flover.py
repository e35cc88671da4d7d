"""Flover: the token steps of all requests that run are fused into one, and a request joins at the step it arrives in.

Reading a prompt and saying tokens are taken apart: a prompt is read alone, and from then on the request is a row of the
one step that all share. A finished request leaves at once and its cache with it, so rows stay dense; the paper reorders
a common buffer for that, here each request has a cache of its own.

The plain ways: one request after another, and dynamic batching, which takes all who wait, and lets nobody join until
the longest of them is finished. Passes of each shape are timed in turn, in several rounds, and all three ways are
reckoned with the same medians, over many drawn arrivals: timed one way after the other, once each, what else the
machine did at that moment decided which was faster. The arrivals drawn first are served for real, to compare outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from time import perf_counter
from typing import NamedTuple

import torch

from models.core.evaluation.golden import LEAST_THRESHOLD, Golden, equal_output
from models.core.layers.decoder import Cache, WideDecoder
from models.systems import Given, Seen

PAPER = "arXiv:2305.13484, sections III and IV"
CLAIM = "over 11× (GPT) and 16× (Llama) faster than FasterTransformer when requests arrive at random"
GAIN = "mean seconds from a request's arrival to its last token, one request after another / fused"
KEPT = "outputs that are the same token by token, or part at a near tie"
SHAPE = "fused requests end sooner than one after another, and than in batches that nobody joins; all outputs stay"
NEEDS = ""
NUM_REQUESTS, MAX_BATCH = 8, 8
NUM_DRAWS, NUM_ROUNDS = 32, 5
GAP_STEPS = 2.0  # mean steps of a single request between two arrivals
SHORTEST = 0.25  # answers are from this share of the longest up to it

# Seconds of a pass, by its sequences and by the tokens that each of them has in it.
Takes = Callable[[int, int], float]


class Request(NamedTuple):
    prompt: list[int]
    num_tokens: int  # of its answer, at least 1
    arrives_s: float


class Pass(NamedTuple):
    numbers: tuple[int, ...]  # of the requests in it
    reads: bool  # whether it reads the prompt of the only one; else each is a row, and has one more token said
    ends_s: float  # on the clock on which requests arrive


class Answer(NamedTuple):
    """What was said, and how sure each token was: the gap of the two best log-probabilities."""

    token_ids: list[int]
    gaps: list[float]


def passes(requests: Sequence[Request], max_batch: int, joins: bool, takes: Takes) -> Iterator[Pass]:
    """Yield the passes that answer requests in the order of their arrival, one after another.

    At most `max_batch` run at once. If none `joins` those that run, it waits until all of them are finished.
    """
    waiting = sorted(range(len(requests)), key=lambda number: requests[number].arrives_s)
    said: dict[int, int] = {}  # tokens of each that runs
    now = 0.0
    while waiting or said:
        if not said:
            now = max(now, requests[waiting[0]].arrives_s)
        # Who arrived joins, or finds nobody or only such as have said their first token alone.
        enters = waiting and len(said) < max_batch and requests[waiting[0]].arrives_s <= now
        if enters and (joins or set(said.values()) <= {1}):
            number = waiting.pop(0)
            said[number] = 0
            one = Pass((number,), True, now + takes(1, len(requests[number].prompt)))
        else:
            one = Pass((*said,), False, now + takes(len(said), 1))
        for number in one.numbers:
            said[number] += 1
        said = {number: count for number, count in said.items() if count < requests[number].num_tokens}
        now = one.ends_s
        yield one


def seconds(requests: Sequence[Request], max_batch: int, joins: bool, takes: Takes) -> list[float]:
    """Return how long after its arrival each request has its last token; see `passes`."""
    ends = {number: one.ends_s for one in passes(requests, max_batch, joins, takes) for number in one.numbers}
    return [ends[number] - request.arrives_s for number, request in enumerate(requests)]


@torch.inference_mode()
def serve(decoder: WideDecoder, requests: Sequence[Request], max_batch: int, joins: bool, takes: Takes) -> list[Answer]:
    """Answer requests greedily in just these `passes`; `takes` decides who meets whom, not what they really take."""
    running: dict[int, _Running] = {}
    for one in passes(requests, max_batch, joins, takes):
        if one.reads:
            (number,) = one.numbers
            running[number] = _read(decoder, requests[number])
        else:
            _step(decoder, [running[number] for number in one.numbers])
    return [running[number].answer for number in range(len(requests))]


def study(given: Given, rng: torch.Generator) -> Seen:
    """Serve the same requests in the three ways, with what passes take here."""
    return compare(given, _takes(given), rng)


def compare(given: Given, takes: Takes, rng: torch.Generator) -> Seen:
    """Serve the same requests in the three ways. They take the prompts in turn, and answers are of up to `num_tokens`;
    arrivals and lengths are drawn."""
    drawn = [_draw(given, takes(1, 1), rng) for _ in range(NUM_DRAWS)]
    one_s, batch_s, fused_s = (
        fmean(fmean(seconds(requests, max_batch, joins, takes)) for requests in drawn)
        for max_batch, joins in ((1, False), (MAX_BATCH, False), (MAX_BATCH, True))
    )
    plain = serve(given.decoder, drawn[0], 1, False, takes)
    fused = serve(given.decoder, drawn[0], MAX_BATCH, True, takes)
    kept = fmean(_same(request, one, other) for request, one, other in zip(drawn[0], plain, fused, strict=True))
    return Seen(one_s / fused_s, kept, fused_s < min(one_s, batch_s) and kept == 1)


class _Running(NamedTuple):
    cache: Cache
    answer: Answer


def _draw(given: Given, step_s: float, rng: torch.Generator) -> list[Request]:
    """Return requests that arrive at random, as often as so many steps of a single request allow."""
    gaps = torch.empty(NUM_REQUESTS).exponential_(1.0, generator=rng) * GAP_STEPS * step_s
    shortest = max(1, round(SHORTEST * given.num_tokens))
    lengths = torch.randint(shortest, given.num_tokens + 1, (NUM_REQUESTS,), generator=rng).tolist()
    return [
        Request(given.prompts[number % len(given.prompts)], length, arrives_s)
        for number, (length, arrives_s) in enumerate(zip(lengths, gaps.cumsum(0).tolist(), strict=True))
    ]


def _same(request: Request, plain: Answer, other: Answer) -> bool:
    """Whether an output is the plain one, as far as arithmetic in batches of another shape can tell."""
    golden = Golden(prompt_ids=tuple(request.prompt), token_ids=tuple(plain.token_ids), gaps=tuple(plain.gaps))
    return equal_output(golden, other.token_ids, LEAST_THRESHOLD) != "different"


def _read(decoder: WideDecoder, request: Request) -> _Running:
    cache = Cache(decoder, len(request.prompt) + request.num_tokens)
    states, _ = decoder.forward(torch.tensor(request.prompt, device=decoder.device), cache)
    running = _Running(cache, Answer([], []))
    _say(decoder, [running], states[-1:])
    return running


def _step(decoder: WideDecoder, running: Sequence[_Running]) -> None:
    last = torch.tensor([one.answer.token_ids[-1] for one in running], device=decoder.device)
    _say(decoder, running, decoder.together(last, [one.cache for one in running]))


def _say(decoder: WideDecoder, running: Sequence[_Running], states: torch.Tensor) -> None:
    """Append to each answer what its row of the states [n, H] says."""
    best = decoder.logits(states).log_softmax(-1).topk(2)
    gaps = best.values[:, 0] - best.values[:, 1]
    for one, token, gap in zip(running, best.indices[:, 0].tolist(), gaps.tolist(), strict=True):
        one.answer.token_ids.append(token)
        one.answer.gaps.append(gap)


@torch.inference_mode()
def _takes(given: Given) -> Takes:
    """Time a pass of each shape, in turn, after a first round that warms up; returns the medians."""
    lengths = {len(prompt): prompt for prompt in given.prompts}
    took: dict[tuple[int, int], list[float]] = {}
    for _ in range(1 + NUM_ROUNDS):
        for length, prompt in lengths.items():
            started = perf_counter()
            _read(given.decoder, Request(prompt, 1, 0.0))
            took.setdefault((1, length), []).append(perf_counter() - started)
        prompts = [given.prompts[number % len(given.prompts)] for number in range(MAX_BATCH)]
        running = [_read(given.decoder, Request(prompt, 1 + MAX_BATCH, 0.0)) for prompt in prompts]
        for number in range(1, MAX_BATCH + 1):
            started = perf_counter()
            _step(given.decoder, running[:number])
            took.setdefault((number, 1), []).append(perf_counter() - started)
    medians = {shape: median(times[1:]) for shape, times in took.items()}
    return lambda num_sequences, num_tokens: medians[num_sequences, num_tokens]
