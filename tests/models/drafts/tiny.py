"""Drafts of any family for the two-layer target; a family that needs other Params for it says so in its own test."""

from importlib import import_module
from pathlib import Path

import numpy as np

from infra.manifest import write_manifest
from models.drafts import Draft, Family, name_of
from tests.conftest import shake

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def make_tiny(family: Family, target: Path, seed: int = 0, scale: float = 0.02) -> Draft:
    """Make a draft with seeded noise on its weights; its Params are `TINY` of the family's test file, if it has one."""
    counts = np.zeros(259)
    counts[3:67] = 1
    [file] = HERE.rglob(f"test_{name_of(family)}.py")
    module = import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    draft = family.create(family.Params(name=name_of(family), **getattr(module, "TINY", {})), target, counts)
    if hasattr(family, "collect"):
        family.collect(draft, [list(range(3, 60))])
    shake(draft, scale, seed)
    return draft


def save_tiny(family: Family, target: Path, directory: Path, seed: int = 0, scale: float = 0.02) -> Path:
    """Save such a draft with its manifest, and return its directory."""
    family.save(make_tiny(family, target, seed, scale), directory)
    write_manifest(directory)
    return directory
