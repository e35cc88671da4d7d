"""EasySpec: a draft whose attentions of several layers run at the same time, each on a device of its own.

So the attentions of g layers in a row all read what the first of them reads, one a device, and their MLPs follow in
turn, shared by all devices. What they say is fuzzy; the target verifies it as ever. After each round one exact pass
over the drafted tokens writes the cache anew, so that errors never pile up.

What is kept of an exact draft's accepted tokens is seen here by letting the model draft for itself: exactly, all of its
tokens are accepted. Times are counted, with L layers, attention a and MLP m of all of them, shared by n devices,
the rest h (embedding and output matrix) and a meeting s:

    shared:   a(n) + m(n) + 2 L s + h          (no meetings if n = 1; the best n up to g counts)
    at once:  a(1) / g + m(g) + (L / g + L) s + h, and an exact pass over the round's K tokens
"""

import torch

from models.core.layers.decoder import Cache, WideDecoder
from models.systems import Given, Seen, Times

PAPER = "arXiv:2502.02493, sections 3 and 4"
CLAIM = "drafting up to 1.62× faster, with at most 7% less accepted"
GAIN = "ms to draft a round, at the best tensor-parallel size / layers at once"
KEPT = "what the exact draft has accepted"
SHAPE = "drafting takes less time than at any tensor-parallel size, and 93% or more is still accepted"
NEEDS = "a model as large as the paper's, and devices that compute side by side"
GROUP, NUM_DRAFTED = 4, 5
LEAST_KEPT = 0.93


def shared_ms(times: Times, num_layers: int, num_devices: int) -> float:
    """Return what a drafted token takes where devices share every layer."""
    meetings = 2 * num_layers * times.meet_ms if num_devices > 1 else 0.0
    return times.attention_ms[num_devices] + times.mlp_ms[num_devices] + meetings + times.rest_ms


def at_once_ms(times: Times, num_layers: int, group: int) -> float:
    """Return what a drafted token takes where attentions of a group of layers run at once."""
    num_groups = -(-num_layers // group)
    attention_ms = times.attention_ms[1] * num_groups / num_layers
    return attention_ms + times.mlp_ms[group] + (num_groups + num_layers) * times.meet_ms + times.rest_ms


def gain(times: Times, num_layers: int, group: int, num_drafted: int) -> float:
    """Return the time of a round of drafting, shared as is best / at once with the exact pass after it.

    `group` is how many devices there are, and layers whose attentions run at once.
    """
    line = times.cost.line(1)
    assert line is not None
    best_ms = min(shared_ms(times, num_layers, size) for size in range(1, group + 1))
    # Rows of one pass are shared as one row is.
    calibration_ms = best_ms * line.target_ms(num_drafted) / line.target_ms(1)
    return num_drafted * best_ms / (num_drafted * at_once_ms(times, num_layers, group) + calibration_ms)


@torch.inference_mode()
def accepted(decoder: WideDecoder, prompt: list[int], num_tokens: int, group: int, num_drafted: int) -> float:
    """Return the share of tokens, drafted by the model's own layers in groups, that it accepts of itself. The prompt
    has two tokens or more, and the answer is greedy. A group of 1 is the exact draft."""
    cache = Cache(decoder, len(prompt) + num_tokens + num_drafted + 1)
    decoder.forward(torch.tensor(prompt[:-1], device=decoder.device), cache)
    last, num_said, num_kept, num_rounds = prompt[-1], 0, 0, 0
    while num_said < num_tokens:
        start, drafted = cache.length, [last]
        for _ in range(num_drafted):
            states = decoder.grouped(torch.tensor(drafted[-1:], device=decoder.device), cache, group)
            drafted.append(int(decoder.logits(states).argmax()))
        cache.keep(start, [])
        # The exact pass verifies, and writes the cache anew.
        states, _ = decoder.forward(torch.tensor(drafted, device=decoder.device), cache)
        said = decoder.logits(states).argmax(-1).tolist()
        right = [one == other for one, other in zip(drafted[1:], said, strict=False)]
        kept = right.index(False) if False in right else num_drafted
        cache.keep(start, list(range(kept + 1)))
        last, num_said, num_kept, num_rounds = said[kept], num_said + kept + 1, num_kept + kept, num_rounds + 1
    return num_kept / (num_rounds * num_drafted)


def study(given: Given, rng: torch.Generator) -> Seen:
    """Let the model draft for itself, and count what that would take; nothing is drawn."""
    kept = [accepted(given.decoder, prompt, given.num_tokens, GROUP, NUM_DRAFTED) for prompt in given.prompts]
    share = sum(kept) / len(kept)
    times_gain = gain(given.times, given.decoder.num_layers, GROUP, NUM_DRAFTED)
    return Seen(times_gain, share, times_gain > 1 and share >= LEAST_KEPT)
