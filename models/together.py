"""Which methods go together, told by what each declares, before anything is computed. No method is named here.

A method's module, or its family's `__init__` for all of them, says

- `CHANGES`: what it changes of the model or of its training; where its settings decide, `changes(params)` says it;
- `KEEPS`: what it makes or leaves so that nothing after it may change it;
- `CORNERS`, optional: `Params` beside the defaults with which pairs of methods are tried on a small model.

A later method that changes what an earlier one keeps is refused. What is named in `LOST` can be kept.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

from models import catalog
from models.params import BaseParams

# What can be kept, to what a method does that changes it; "{}" is whoever keeps it.
LOST = {
    "zeroes": "fills the zeroes of {}",
    "low rank": "raises the low rank of {}",
    "frozen weights": "rewrites the frozen weights of {}",
    "weight gradients": "changes gradients of weights, of which there are none with {}",
}
# What of training one regime can change: how linear layers multiply, which layers run, what of the weights is free,
# which steps run, how documents become batches, what is kept for the backward pass, in which format is computed, where
# the optimizer's state lies, when training ends, and the loop itself.
PARTS = ("products", "depth", "weights", "steps", "batches", "activations", "precision", "optimizer", "end", "loop")
# What an exception of a quantized model leaves as it was, instead of naming another method.
FLOAT = "float"
# What engines multiply as one matrix.
AS_ONE = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
Regimes = TypeVar("Regimes", bound=Sequence[BaseParams])
_DEPTH = 256  # blocks that patterns are tried on before there is a model


class Declared(NamedTuple):
    """What one method declares; errors call it `where`."""

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
    """Raise ValueError naming two methods, in the order they run, of which the later changes what the earlier keeps."""
    for earlier, later in combinations(methods, 2):
        for what in LOST:
            if what in earlier.keeps and what in later.changes:
                raise ValueError(f"{later.where} {LOST[what].format(earlier.where)}; choose one of the two")


def require_compatible(regimes: Regimes) -> Regimes:
    """Return regimes; ValueError naming two that change the same part of training, or one that combines with none."""
    changed: dict[str, str] = {}
    for regime in regimes:
        parts = catalog.load("regimes", regime.name).CHANGES
        if "loop" in parts and len(regimes) > 1:
            raise ValueError(f'regime "{regime.name}" is a loop of its own and combines with no other')
        for part in (part for part in PARTS if part in parts):
            if part in changed:
                raise ValueError(f'regimes "{changed[part]}" and "{regime.name}" both change the {part}; choose one')
            changed[part] = regime.name
    return regimes


def require_exceptions(method: BaseParams, exceptions: Mapping[str, Any]) -> None:
    """Raise ValueError if exceptions can't be served beside a method, or tear layers apart; names the pattern."""
    stored = catalog.load("quantize", method.name).STORED
    for pattern, other in exceptions.items():
        module = None if other == FLOAT else catalog.load("quantize", other.name)
        if module is not None and (stored != module.STORED or hasattr(module, "Hooks")):
            raise ValueError(
                f'exception "{pattern}": "{other.name}" can\'t stand beside "{method.name}"; '
                f"choose one that is stored as {stored} too and trains nothing, or {FLOAT!r}"
            )
        for number in range(_DEPTH):
            for layers in AS_ONE:
                fitting = [layer for layer in layers if fnmatchcase(f"model.layers.{number}.{layer}", pattern)]
                if 0 < len(fitting) < len(layers):
                    raise ValueError(
                        f'exception "{pattern}" takes {", ".join(fitting)} of {", ".join(layers)}, '
                        "which engines multiply as one matrix"
                    )
