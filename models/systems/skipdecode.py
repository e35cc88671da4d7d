"""SkipDecode: how many layers a token goes through falls with its place in the answer, the same for a whole batch.

Here the n-th token of N goes through

    c(n) = round(first + (last − first) · n / (N − 1))

layers: the lowest few, which warm up, and the c(n) − w uppermost. c never rises, so each layer runs for a beginning of
the text alone: whatever it attends to has been through it, and no key is ever computed again. Prompts go through all.

The paper finetunes models under their schedule. Here a model is taken as it is, so what is lost is an upper bound.
"""

import time

import torch

from models.core.layers.decoder import Cache, WideDecoder
from models.systems import Given, Seen

PAPER = "arXiv:2307.02628, section 3"
CLAIM = "2× to 5× faster with negligible regression, in batches and with a cache"
GAIN = "seconds of a batch's token steps, all layers / by schedule"
KEPT = "next tokens that are the same, given the same text"
SHAPE = "at half of the layers 1.5× as fast or more, and 95% of the next tokens or more stay"
NEEDS = "finetuning under the schedule, as the paper does"
FIRST_SHARE, LAST_SHARE, NUM_WARM = 0.75, 0.25, 1
LEAST_GAIN, LEAST_KEPT = 1.5, 0.95


def schedule(
    num_layers: int, num_tokens: int, first_share: float, last_share: float, num_warm: int
) -> list[tuple[int, ...]]:
    """Return the layers that each token of an answer goes through, each the same as the one before it or fewer.

    Shares are of the layers at the first and last token; the `num_warm` lowest layers always run.
    """
    layers = []
    for place in range(num_tokens):
        share = first_share + (last_share - first_share) * place / max(1, num_tokens - 1)
        count = min(num_layers, max(num_warm + 1, round(share * num_layers)))
        layers.append((*range(num_warm), *range(num_layers - count + num_warm, num_layers)))
    return layers


@torch.inference_mode()
def answer(
    decoder: WideDecoder, prompts: list[list[int]], layers: list[tuple[int, ...]], given: list[list[int]] | None = None
) -> tuple[list[list[int]], float]:
    """Answer a batch greedily; each token that is read after the prompt goes through the layers of its place.

    Answers that are `given` are read in place of what is said. Returned are what is said after each prompt, a token
    more than layers, and the seconds of the token steps.
    """
    caches = [Cache(decoder, len(prompt) + len(layers)) for prompt in prompts]
    states = [
        decoder.forward(torch.tensor(prompt, device=decoder.device), cache)[0][-1:]
        for prompt, cache in zip(prompts, caches, strict=True)
    ]
    said = [decoder.logits(torch.cat(states)).argmax(-1)]
    started = time.perf_counter()
    for place, through in enumerate(layers):
        read = said[-1] if given is None else torch.tensor([one[place] for one in given], device=decoder.device)
        said.append(decoder.logits(decoder.together(read, caches, through)).argmax(-1))
    seconds = time.perf_counter() - started
    return torch.stack(said, dim=1).tolist(), seconds


def study(given: Given, rng: torch.Generator) -> Seen:
    """Answer all prompts as one batch, then read the answers again by schedule; nothing is drawn."""
    decoder, num_steps = given.decoder, given.num_tokens - 1
    whole = [tuple(range(decoder.num_layers))] * num_steps
    answer(decoder, given.prompts, whole[:2])  # warms up
    plain, plain_s = answer(decoder, given.prompts, whole)
    fewer = schedule(decoder.num_layers, num_steps, FIRST_SHARE, LAST_SHARE, NUM_WARM)
    skipped, skipped_s = answer(decoder, given.prompts, fewer, plain)
    same = torch.tensor(plain)[:, 1:] == torch.tensor(skipped)[:, 1:]
    gain, kept = plain_s / skipped_s, float(same.double().mean())
    return Seen(gain, kept, gain >= LEAST_GAIN and kept >= LEAST_KEPT)
