"""Whether there is memory for a refresh: by what the last one took or, before the first, by the champions' files."""

from pathlib import Path

from infra.memory import GIB, own_gib, read_memory
from infra.registry import open_registry
from infra.settings import load_settings
from infra.triggerfile import TriggerState
from infra.versions import cached
from models.recipe import Recipe

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
    """
    need = max(recipe.schedule.min_free_memory_gib, seen.need.gib if seen.need else _of_files())
    room = read_memory().room_gib + (own_gib() if starts else 0.0)
    return "" if room >= need else f"{max(0.0, room):.1f} GiB to spare, {need:.1f} wanted"


def _of_files() -> float:
    settings = load_settings()
    registry, need = open_registry(settings), LIBRARIES_GIB
    for champion, factor in ((registry.champion("target"), TARGET_FACTOR), (registry.champion("draft"), DRAFT_FACTOR)):
        if champion is not None:
            need += factor * _num_bytes(cached(champion, settings.cache)) / GIB
    return need


def _num_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
