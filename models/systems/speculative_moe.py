"""Speculative MoE: tokens are put on the device of the experts that they are likely to be routed to, before the gate.

With experts spread over D devices, each token is sent to the devices of its k experts, once each, and its outputs back:
two all-to-alls a layer. Between attention and experts a reduce-scatter gives each device an equal share of the tokens
anyway; which ones is free. So each token goes where most of its experts are expected (token shuffling), and an
all-gather after the layer puts all of them back in order. Experts that the same tokens choose lie together (expert
grouping, before serving). What was guessed wrong is sent as ever, so the output stays.

How often a token chooses an expert is known from a profile of other text: how often the same token did, n times seen,
and, counting as one time more, how often tokens did that had the same first expert one layer before.

The experts here are small and random, behind the real model's residual stream. Gates read it centred and scaled by the
profile, since gates that are trained send equally much to all experts and random ones on raw states do not. Rows that
are sent are counted; with H numbers a row, r ms to copy one here, and a meeting s, an all-to-all takes

    (D − 1) s + r · (rows that the busiest device sends or is sent).

The paper's solver of the grouping and its fused collectives are left out: grouping is greedy, and orders cost nothing.
"""

from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.core.layers.decoder import Cache, WideDecoder
from models.systems import Given, Seen

PAPER = "arXiv:2503.04398, sections 3 and 4"
CLAIM = (
    "all-to-all traffic of experts is trimmed without loss, by shuffled tokens and by grouped experts, each of its own"
)
GAIN = "ms of a layer's all-to-alls, tokens and experts where they stand / pre-scheduled"
KEPT = "outputs of the experts, up to rounding"
SHAPE = "fewer rows are sent than without either, than with either alone, and all outputs stay"
NEEDS = "experts that were trained, and links between devices"
NUM_DEVICES, NUM_EXPERTS, TOP_K, EXPERT_WIDTH = 4, 16, 2, 32
NUM_ANSWERS = 8  # of each prompt, drawn at temperature 1; every other one is the profile
REPEATS, NUM_COPIED = 9, 512


class Routed(NamedTuple):
    """Tokens, and the experts that gates chose for them."""

    token_ids: Tensor  # [T] int64
    chosen: Tensor  # [L, T, k] int64, of each layer, the likeliest first


class Layer(NamedTuple):
    up: Tensor  # [E, H, I]
    down: Tensor  # [E, I, H]


def in_order(number: int, num_devices: int) -> Tensor:
    """Return the device [number] of each where they stand: equally many in a row on each."""
    return torch.arange(number) * num_devices // number


def expected(profile: Routed, routed: Routed, layer: int) -> Tensor:
    """Return how many of its choices each token is expected to give to each expert of a layer, [T, E]; rows sum to k.
    Of the choices of `routed`, those of the layer before are read."""
    by_token, num_seen = _by_token(profile, layer, routed.token_ids)
    chose = _counts(profile.chosen[layer])  # [N, E]
    if layer == 0:
        else_like = chose.mean(dim=0).expand(len(by_token), -1)
    else:
        first = functional.one_hot(profile.chosen[layer - 1, :, 0], NUM_EXPERTS).float()  # [N, E]
        totals = first.sum(dim=0)[:, None]
        after = torch.where(totals > 0, first.T @ chose / totals.clamp(min=1), chose.mean(dim=0))
        else_like = after[routed.chosen[layer - 1, :, 0]]
    return (by_token + else_like) / (num_seen[:, None] + 1)


def group(profile: Routed, layer: int, num_devices: int) -> Tensor:
    """Return the device [E] of each expert, equally many on each: those that the same tokens choose lie together."""
    by_token, num_seen = _by_token(profile, layer, profile.token_ids.unique())
    together = by_token.T @ (by_token / num_seen[:, None])  # [E, E]
    homes = torch.full((NUM_EXPERTS,), -1)
    for device in range(num_devices):
        free = homes < 0
        homes[int(together.diagonal().masked_fill(~free, -1).argmax())] = device
        for _ in range(NUM_EXPERTS // num_devices - 1):
            near = together[:, homes == device].sum(dim=1)
            homes[int(near.masked_fill(homes >= 0, -1).argmax())] = device
    return homes


def place(wanted: Tensor) -> Tensor:
    """Return the device [T] of each token, equally many on each up to one: those first that lose most elsewhere.
    `wanted` [T, D] is how many of its experts each token is expected to find on each device."""
    num_tokens, num_devices = wanted.shape
    room = in_order(num_tokens, num_devices).bincount(minlength=num_devices).tolist()
    best = wanted.topk(min(2, num_devices), dim=1).values
    waiting = (best[:, 0] - best[:, -1]).argsort(descending=True, stable=True).tolist()
    places, order = torch.full((num_tokens,), -1), wanted.argsort(dim=1, descending=True, stable=True).tolist()
    for rank in range(num_devices):  # nobody takes the room of those who want it more
        for token in waiting:
            if room[order[token][rank]]:
                places[token] = order[token][rank]
                room[order[token][rank]] -= 1
        waiting = [token for token in waiting if places[token] < 0]
    return places


def sent(chosen: Tensor, homes: Tensor, places: Tensor, num_devices: int) -> Tensor:
    """Return how many rows go from each device to each other one, [D, D]; each token goes to a device once. Experts are
    chosen [T, k], and devices of experts are `homes` [E], of tokens `places` [T]."""
    wants = functional.one_hot(homes[chosen], num_devices).amax(dim=1)  # [T, D]
    rows = functional.one_hot(places, num_devices).T @ wants
    return rows - rows.diag().diag()


def compute(
    layer: Layer, states: Tensor, chosen: Tensor, weights: Tensor, homes: Tensor, places: Tensor, num_devices: int
) -> Tensor:
    """Run tokens [T, H] through their experts device by device, in the order of places, and put them back in order. Of
    what chosen experts put out weights are [T, k]; for the others see `sent`."""
    order = places.argsort(stable=True)
    states, chosen, weights = states[order], chosen[order], weights[order]
    outputs = torch.zeros_like(states)
    for device in range(num_devices):
        part = torch.zeros_like(states)  # what goes back from this device
        for expert in (homes == device).nonzero()[:, 0].tolist():
            rows, number = (chosen == expert).nonzero(as_tuple=True)
            added = functional.silu(states[rows] @ layer.up[expert]) @ layer.down[expert]
            part.index_add_(0, rows, added * weights[rows, number, None])
        outputs = outputs + part
    return torch.empty_like(outputs).index_copy_(0, order, outputs)


@torch.inference_mode()
def study(given: Given, rng: torch.Generator) -> Seen:
    """Route what the model writes behind the prompts, profile half of it and serve the other; all of that is drawn."""
    texts = [text for prompt in given.prompts for text in _write(given.decoder, prompt, given.num_tokens, rng)]
    read = [_read(given.decoder, text, given.num_tokens) for text in texts]
    token_ids = [torch.tensor(text[-given.num_tokens : -1]) for text in texts]
    layers = given.decoder.num_layers
    width = read[0].shape[1] // layers
    known, states = (torch.cat([one.view(-1, layers, width) for one in read[first::2]]) for first in (0, 1))
    mean, scale = known.mean(dim=0), known.std(dim=0).clamp(min=1e-6)
    gates = torch.randn(layers, width, NUM_EXPERTS, generator=rng) / width**0.5
    chances = [torch.einsum("tlh,lhe->lte", (one - mean) / scale, gates).softmax(-1) for one in (known, states)]
    best = [one.topk(TOP_K, dim=-1) for one in chances]
    profile, served = (Routed(torch.cat(token_ids[first::2]), best[first].indices) for first in (0, 1))
    weights = best[1].values / best[1].values.sum(dim=-1, keepdim=True)

    rows = torch.zeros(2, 2, dtype=torch.int64)  # by whether experts are grouped, and whether tokens are shuffled
    busiest, kept = torch.zeros(2, 2), 0.0
    for number in range(layers):
        homes = (in_order(NUM_EXPERTS, NUM_DEVICES), group(profile, number, NUM_DEVICES))
        likely, outputs = expected(profile, served, number), []
        shape = (NUM_EXPERTS, width, EXPERT_WIDTH)
        drawn = torch.randn(2, *shape, generator=rng) / torch.tensor([width, EXPERT_WIDTH]).sqrt().view(2, 1, 1, 1)
        layer = Layer(drawn[0], drawn[1].transpose(1, 2))
        for grouped, of_experts in enumerate(homes):
            wanted = likely @ functional.one_hot(of_experts, NUM_DEVICES).float()
            for shuffled, places in enumerate((in_order(len(wanted), NUM_DEVICES), place(wanted))):
                traffic = sent(served.chosen[number], of_experts, places, NUM_DEVICES)
                rows[grouped, shuffled] += traffic.sum()
                busiest[grouped, shuffled] += max(traffic.sum(dim=0).max(), traffic.sum(dim=1).max())
                if grouped == shuffled:  # nothing is done, or both
                    into = (states[:, number] - mean[number]) / scale[number]
                    routed = served.chosen[number], weights[number], of_experts, places, NUM_DEVICES
                    outputs.append(compute(layer, into, *routed))
        same = (outputs[0] - outputs[1]).abs().amax(dim=1) <= 1e-4 * outputs[0].abs().amax(dim=1)
        kept += float(same.float().mean()) / layers
    meetings, row_ms = layers * (NUM_DEVICES - 1) * given.times.meet_ms, _row_ms(width)
    plain_ms, both_ms = (meetings + row_ms * float(busiest[done, done]) for done in (0, 1))
    kept = round(kept, 9)
    fewer = bool(rows[1, 1] < min(rows[0, 0], rows[0, 1], rows[1, 0]))
    return Seen(plain_ms / both_ms, kept, fewer and kept == 1)


def _counts(chosen: Tensor) -> Tensor:
    """[N, k] → [N, E] how often each token chose each expert."""
    return functional.one_hot(chosen, NUM_EXPERTS).sum(dim=-2).float()


def _by_token(profile: Routed, layer: int, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return how often each of the tokens [n] chose each expert in the profile [n, E], and how often it was there."""
    same = (token_ids[:, None] == profile.token_ids).float()  # [n, N]
    return same @ _counts(profile.chosen[layer]), same.sum(dim=1)


def _write(decoder: WideDecoder, prompt: list[int], num_tokens: int, rng: torch.Generator) -> list[list[int]]:
    """Return a prompt with answers that were drawn at temperature 1, side by side."""
    caches = [Cache(decoder, len(prompt) + num_tokens) for _ in range(NUM_ANSWERS)]
    states, _ = decoder.forward(torch.tensor(prompt, device=decoder.device), caches[0])
    for cache in caches[1:]:
        cache.keys.copy_(caches[0].keys)
        cache.values.copy_(caches[0].values)
        cache.length = caches[0].length
    states, drawn = states[-1:].expand(NUM_ANSWERS, -1), []
    for number in range(num_tokens):
        chances = decoder.logits(states).softmax(-1).cpu()
        drawn.append(torch.multinomial(chances, 1, generator=rng)[:, 0])
        if number + 1 < num_tokens:
            states = decoder.together(drawn[-1].to(decoder.device), caches)
    return [[*prompt, *answer] for answer in torch.stack(drawn, dim=1).tolist()]


def _read(decoder: WideDecoder, text: list[int], num_tokens: int) -> Tensor:
    """Return what each layer puts out at the answer's tokens but the last, [num_tokens − 1, L · H]."""
    cache, taps = Cache(decoder, len(text)), tuple(range(1, decoder.num_layers + 1))
    _, tapped = decoder.forward(torch.tensor(text[:-1], device=decoder.device), cache, taps)
    return tapped[1 - num_tokens :].float().cpu()


def _row_ms(width: int) -> float:
    here, there = torch.zeros(NUM_COPIED, width), torch.empty(NUM_COPIED, width)
    took = []
    for _ in range(1 + REPEATS):
        started = perf_counter()
        there.copy_(here)
        took.append(1000 * (perf_counter() - started) / NUM_COPIED)
    return median(took[1:])  # the first one warms up
