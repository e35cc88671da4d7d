"""Drafts of any family for the two-layer target; a family that needs other Params for it says so in its own test."""

from importlib import import_module
from pathlib import Path

import numpy as np

from infra.manifest import write_manifest
from models.drafting.draft_families import name_of
from models.drafts import Draft, Family
from models.params import BaseParams
from tests.conftest import shake

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def params_of(family: Family, served: bool = False, refused: bool = False) -> BaseParams:
    """Return what `TINY` of the family's test file says, if it has one.

    Where it is to be `served`, by three tokens a step, what `SERVED` says there goes before; where vLLM is to refuse it
    what `REFUSED` says, if it has that.
    """
    [file] = HERE.rglob(f"test_{name_of(family)}.py")
    module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    shape = getattr(module, "TINY", {}) | (getattr(module, "SERVED", {}) if served else {})
    shape |= getattr(module, "REFUSED", {}) if refused else {}
    return family.Params(name=name_of(family), **shape)


def make_tiny(family: Family, target: Path, seed: int = 0, scale: float = 0.02, served: bool = False) -> Draft:
    """Make a draft of such Params, with seeded noise on its weights."""
    counts = np.zeros(259)
    counts[3:67] = 1
    draft = family.create(params_of(family, served), target, counts)
    if hasattr(family, "collect"):
        family.collect(draft, [list(range(3, 60))])
    shake(draft, scale, seed)
    return draft


def save_tiny(
    family: Family, target: Path, directory: Path, seed: int = 0, scale: float = 0.02, served: bool = False
) -> Path:
    """Save such a draft with its manifest, and return its directory."""
    family.save(make_tiny(family, target, seed, scale, served), directory)
    write_manifest(directory)
    return directory
