"""Which layers carry the loss of a quantized target, and what excepting them brings back.

The form is `int8_static`, one scale a layer for all inputs, which loses most of those of 8 bits. "only …" quantizes one
kind of layer, or the layers of one quarter of the depth, and leaves the rest in floats. "… dynamic" and "… in floats"
quantize all but an exception. "N of 7 by lot, dynamic" is the control for exceptions of that many of a block's seven
layers: as many of the model's layers, which the seed draws among those that engines don't multiply as one.
"""

from collections.abc import Mapping
from typing import Any

import torch

from models.core.checkpoints import mixed
from models.core.checkpoints.loading import load_floats, moved
from models.core.layers.linears import blocks, enough_tokens
from models.stages import Quantize
from models.together import FLOAT
from tasks.measure import likeness
from tasks.measure.comparisons import Bench, Row, draw, shuffled

QUESTION = "Which layers carry the loss of 8-bit weights and inputs, and what do exceptions bring back?"
BASELINE = "all static"
COLUMNS = {
    **likeness.COLUMNS,
    "layers": "layers in static 8 bits",
    "size_mib": "size of the weights, MiB (lower is better)",
}
METHOD = {"name": "int8_static"}
DYNAMIC = {"name": "int8_dynamic"}
KINDS = {
    "q, k, v": "*.self_attn.[qkv]_proj",
    "o": "*.self_attn.o_proj",
    "gate, up": "*.mlp.[gu]*_proj",
    "down": "*.mlp.down_proj",
}
SIZES = {kind: len(kind.split(", ")) for kind in KINDS}  # layers of a block
NUM_PARTS = 4
LENGTH, READ_TOKENS = 256, 2048


def rows(budget: float) -> list[Row]:
    """See `tasks.measure.comparisons`; `budget` scales the tokens that are calibrated on and read."""
    others = {kind: {KINDS[other]: FLOAT for other in KINDS if other != kind} for kind in KINDS}
    whole = sum(SIZES.values())
    return [
        Row(BASELINE, {"exceptions": {}}),
        *(Row(f"only {kind}", {"exceptions": others[kind]}) for kind in KINDS),
        *(Row(f"only quarter {part + 1}", {"part": part}) for part in range(NUM_PARTS)),
        *(Row(f"{kind} dynamic", {"exceptions": {pattern: DYNAMIC}}) for kind, pattern in KINDS.items()),
        *(Row(f"{size} of {whole} by lot, dynamic", {"by_lot": size}) for size in sorted({*SIZES.values()})),
        Row("down in floats", {"exceptions": {KINDS["down"]: FLOAT}}),
        Row("all dynamic", {"exceptions": {"*": DYNAMIC}}),
    ]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    model = moved(load_floats(bench.target_dir), bench.device)
    calibration = draw(bench.train, max(LENGTH, round(enough_tokens(model) * bench.budget)), LENGTH, seed)
    held_out = draw(bench.held_out, max(LENGTH, round(READ_TOKENS * bench.budget)), LENGTH, seed)
    exceptions = _exceptions(row.settings, len(blocks(model)), seed)
    stage = Quantize.model_validate({"method": METHOD, "exceptions": exceptions})
    made = mixed.quantize(model, calibration, stage.method, stage.exceptions)
    return {
        **likeness.measure_likeness(bench, made.model, held_out),
        "layers": float(sum(name.endswith(".input_scale") for name in made.tensors)),
        "size_mib": made.num_bytes / 2**20,
    }


def _exceptions(settings: Mapping[str, Any], num_blocks: int, seed: int) -> dict[str, Any]:
    """Return a row's own, those that leave one part of the depth, or as many layers by lot as blocks have of a kind."""
    if "by_lot" in settings:
        return dict.fromkeys(_by_lot(settings["by_lot"] * num_blocks, num_blocks, seed), DYNAMIC)
    if "part" not in settings:
        return dict(settings["exceptions"])
    own = range(settings["part"] * num_blocks // NUM_PARTS, (settings["part"] + 1) * num_blocks // NUM_PARTS)
    return {f"model.layers.{number}.*": FLOAT for number in range(num_blocks) if number not in own}


def _by_lot(num_layers: int, num_blocks: int, seed: int) -> list[str]:
    """Draw patterns that fit `num_layers` layers in all, each those of one kind in one block."""
    rng = torch.Generator().manual_seed(seed)
    units = [(kind, number) for kind in KINDS for number in range(num_blocks)]
    while True:  # the last of a draw may be too many
        left, found = num_layers, []
        for kind, number in shuffled(units, rng):
            if SIZES[kind] <= left:
                left -= SIZES[kind]
                found.append(f"model.layers.{number}.{KINDS[kind].removeprefix('*.')}")
        if not left:
            return sorted(found)
