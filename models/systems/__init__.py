"""Ways to run models on several requests or devices at once, each held against what its paper claims of it.

A method here is a study and not a part of an engine: it runs the plain way and its own on the same work where this
machine can, and else counts both with times that were measured here part by part. A module has

- `CLAIM`: what the paper says is gained, in a sentence;
- `GAIN`: what is divided, the plain way's by the method's, so that more than 1 is better;
- `KEPT`: what is kept of the plain way's output, 1 for all of it;
- `SHAPE`: what must be seen for the claim to hold in shape, in a sentence; it is what `study` tests;
- `NEEDS`: what the claim is of and is not here, such as devices, for which times are counted; else "";
- `study(given, rng) -> Seen`: run it on the model and the prompts that are given.
"""

from typing import NamedTuple

from models.core.layers.decoder import WideDecoder
from models.core.throughput.cost import Cost


class Times(NamedTuple):
    """What parts of a step of one sequence take on a machine, in ms."""

    cost: Cost  # whole passes, by the rows of the model that are read
    attention_ms: dict[int, float]  # of all layers at one row, by the number of devices that share the heads; from 1
    mlp_ms: dict[int, float]  # the same of their MLPs, by the number of devices that share the channels
    rest_ms: float  # of embedding, last norm and output matrix
    meet_ms: float  # for one worker to hand a result to another that waits for it


class Given(NamedTuple):
    """What a study works with."""

    decoder: WideDecoder  # the model
    prompts: list[list[int]]  # token ids, at least two tokens each
    num_tokens: int  # of an answer
    times: Times  # of parts of this model's steps


class Seen(NamedTuple):
    """What a study saw: `GAIN`, `KEPT`, and whether the claim holds in `SHAPE`."""

    gain: float
    kept: float
    holds: bool


def verdict(held: float, needs: str) -> str:
    """Say what became of a claim by the share of seeds under which its shape was seen, and what is missing, `NEEDS`."""
    if 0 < held < 1:
        return f"open: seen under {held:.0%} of the seeds"
    if held:
        return f"reproduced in shape{needs and f', as far as it tells without {needs}'}"
    return f"not seen without {needs}" if needs else "refuted"
