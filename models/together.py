"""Which methods go together, told by what each declares, before anything is computed. No method is named here.

A method's module, or its family's `__init__` for all of them, says

- `CHANGES`: what it changes of the model or of its training; where its settings decide, `changes(params)` says it;
- `KEEPS`: what it makes or leaves so that nothing after it may change it;
- `CORNERS`, optional: `Params` beside the defaults with which pairs of methods are tried on a small model.

A later method that changes what an earlier one keeps is refused. What is named in `LOST` can be kept.
"""

from collections.abc import Collection, Iterable
from importlib import import_module
from itertools import combinations
from typing import NamedTuple

from models import catalog
from models.params import BaseParams

# What can be kept, to what a method does that changes it; "{}" is whoever keeps it.
LOST = {
    "zeroes": "fills the zeroes of {}",
    "low rank": "raises the low rank of {}",
    "frozen weights": "rewrites the frozen weights of {}",
    "weight gradients": "changes gradients of weights, of which there are none with {}",
}


class Declared(NamedTuple):
    """What one method declares.

    Attributes:
        where: what errors call it.
        changes: what it changes.
        keeps: what it keeps.
    """

    where: str
    changes: Collection[str]
    keeps: Collection[str]


def declared(family: str, params: BaseParams, where: str) -> Declared:
    """Return what a method of a family declares with these settings."""
    module, of_all = catalog.load(family, params.name), import_module(f"models.{family}")
    changes, keeps = (getattr(module, name, getattr(of_all, name, ())) for name in ("CHANGES", "KEEPS"))
    if hasattr(module, "changes"):
        changes = module.changes(params)
    return Declared(where, changes, keeps)


def require_kept(methods: Iterable[Declared]) -> None:
    """Raise ValueError naming two methods of which the later changes what the earlier keeps.

    Args:
        methods: in the order in which they are run.
    """
    for earlier, later in combinations(methods, 2):
        for what in LOST:
            if what in earlier.keeps and what in later.changes:
                raise ValueError(f"{later.where} {LOST[what].format(earlier.where)}; choose one of the two")
