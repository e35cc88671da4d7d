"""Whether there is memory for a refresh: by what the last one took or, before the first, by the champions' files.

A refresh also looks at the memory of the GPU that it is to run on. Who only asks for it does not: to look takes some.
"""

from pathlib import Path

import torch

from infra.memory import GIB, own_gib, read_memory
from infra.registry import open_registry
from infra.settings import load_settings
from infra.triggerfile import TriggerState
from infra.versions import cached
from models.precision import require_device
from models.recipe import Recipe
from tasks.stages.throttle import device_of

# What the libraries hold before anything is loaded.
LIBRARIES_GIB = 1.0
# Bytes held for each byte of a file: of the target as it is; of a draft, stored in 16 bits, in float32 with gradients,
# two moments and a mean.
TARGET_FACTOR, DRAFT_FACTOR = 1.0, 10.0


def short_of_memory(recipe: Recipe, seen: TriggerState, starts: bool = False) -> str:
    """Return why no refresh can start at the moment, "" if there is room.

    What this process holds is part of what it needs where it `starts` it, being the refresh itself.

    Raises:
        ConnectionError: the registry can't be asked.
        ValueError: the device that it is to run on is not here.
    """
    need = max(recipe.schedule.min_free_memory_gib, seen.need.gib if seen.need else _of_files())
    room = read_memory().room_gib + (own_gib() if starts else 0.0)
    if room < need:
        return f"{max(0.0, room):.1f} GiB to spare, {need:.1f} wanted"
    if not starts or (device := device_of(recipe.refresh_distill())) == "cpu":
        return ""
    require_device(device)
    free, need = torch.cuda.mem_get_info(device)[0] / GIB, _of_files()
    return "" if free >= need else f"{free:.1f} GiB of {device} to spare, {need:.1f} wanted"


def _of_files() -> float:
    settings = load_settings()
    registry, need = open_registry(settings), LIBRARIES_GIB
    for champion, factor in ((registry.champion("target"), TARGET_FACTOR), (registry.champion("draft"), DRAFT_FACTOR)):
        if champion is not None:
            need += factor * _num_bytes(cached(champion, settings.cache)) / GIB
    return need


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
