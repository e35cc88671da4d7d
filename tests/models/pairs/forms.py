"""Which settings of which methods are paired, and which pairs are tried: all of them where `PAIRS=all` is set."""

import os
import random
import tomllib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import ValidationError

from models import catalog
from models.params import BaseParams
from models.recipe import shipped_recipes

PairT = TypeVar("PairT", bound=Sequence[Hashable])
TEXT = {"source": {"name": "synthetic", "count": 60}, "num_train": 30, "num_held_out": 10}
ALL = os.environ.get("PAIRS") == "all"


class Form(NamedTuple):
    """A method with some of its settings; `name` says which for a test's id."""

    family: str
    name: str
    params: BaseParams


def forms(family: str, *names: str) -> list[Form]:
    """Return methods of a family, each with its defaults if it has any and with its corners; all if none is named."""
    found = []
    for name in names or catalog.names(family):
        module = catalog.load(family, name)
        corners = list(getattr(module, "CORNERS", ()))
        try:
            settings = [module.Params(), *corners]
        except ValidationError:  # a size must be asked for
            settings = corners
        found += [Form(family, name if number == 0 else f"{name}-{number}", one) for number, one in enumerate(settings)]
    return found


def chosen(pairs: Sequence[PairT], always: Callable[[PairT], bool]) -> list[PairT]:
    """Return the pairs to try: what is asked for always, and of the others as few as have each member in one.

    Args:
        pairs: all that are allowed; a seed draws from them.
        always: whether a pair is tried in any case.
    """
    if ALL:
        return list(pairs)
    kept = [pair for pair in pairs if always(pair)]
    missing = {(place, one) for pair in pairs for place, one in enumerate(pair)}
    missing -= {(place, one) for pair in kept for place, one in enumerate(pair)}
    drawn = random.Random(0).sample(list(pairs), len(pairs))
    for num_new in range(len(drawn[0]), 0, -1):  # those first of which more members are in no other
        for pair in drawn:
            if len(missing & (members := set(enumerate(pair)))) == num_new:
                kept.append(pair)
                missing -= members
    return kept


def named(pair: Sequence[object]) -> str:
    """Return a test's id."""
    return "+".join(one.name if isinstance(one, Form) else str(one) for one in pair)


def recipe_tables() -> dict[str, Any]:
    """Return the tables of a recipe without stages, whose engine is read without vLLM."""
    tiny = tomllib.loads(shipped_recipes()["tiny"].read_text())
    served = {name: table for name, table in tiny.items() if name not in ("serve", "demo")}
    return {**served, "name": "r", "text": {"chat": TEXT}, "engine": {"name": "torch", "num_draft_tokens": 2}}
