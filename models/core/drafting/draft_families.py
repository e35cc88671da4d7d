"""Which family a draft is of, and what is done with drafts of whatever family: opened, checked, taken from others.

Which family a directory is of stands in its config.json, `redraft.family`; one without it, made by others, is of
the one family that has its architecture.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open

from models import catalog
from models.drafts import Adopter, Draft, Family
from models.params import did_you_mean
from models.targets import TargetCard


class UnknownFamily(ValueError):
    """Which family a directory is of can't be told: it names one that this release lacks, or none where many fit."""


def family_named(name: str) -> Family:
    """Return the module of a family; ValueError if there is none of that name."""
    return cast("Family", catalog.load("drafts", name))


def name_of(family: Family) -> str:
    """Return a family's name, its module's."""
    return str(cast("Any", family).__name__).rpartition(".")[2]


def class_of(family: Family) -> type[Draft]:
    """Return the class of a family's drafts."""
    kinds = [one for one in vars(family).values() if isinstance(one, type) and issubclass(one, Draft)]
    return max(kinds, key=lambda kind: len(kind.__mro__))  # the family's own stands on the others


def is_trained(family: Family) -> bool:
    """Whether there are weights to learn."""
    return class_of(family).procedure is not None


def family_of(directory: Path) -> Family:
    """Return the module of the family that a draft directory belongs to.

    Raises:
        UnknownFamily: it names a family that there is not, or none and its architecture is that of several.
        ValueError: it has no config.json that can be read, or names no family and its architecture is that of none.
    """
    config = read_json(directory / "config.json")
    names, named = catalog.names("drafts"), own(config, directory).get("family")
    if named is not None:
        if named not in names:
            raise UnknownFamily(f"draft {directory.name} is of family {named!r}{did_you_mean(str(named), names)}")
        return family_named(named)
    architectures = config.get("architectures")
    families = {name: family_named(name) for name in names}
    having = [name for name, family in families.items() if architectures in [[one] for one in family.ARCHITECTURES]]
    if len(having) > 1:
        raise UnknownFamily(
            f"draft {directory.name} is of architecture {architectures}, which the families {' and '.join(having)} "
            f'have; say which it is in its config.json, as "redraft": {{"family": "{having[0]}"}}'
        )
    if not having:
        known = sorted({one for family in families.values() for one in family.ARCHITECTURES})
        raise ValueError(f"draft {directory.name} is of architecture {architectures}; there are: {', '.join(known)}")
    return families[having[0]]


def adopter_of(directory: Path) -> Adopter:
    """Return the module of the family that can take a draft which others published.

    Raises:
        ValueError: it has no config.json that can be read, or no family or several read its layout.
    """
    config = read_json(directory / "config.json")
    adopters = [cast("Adopter", one) for one in map(family_named, catalog.names("drafts")) if hasattr(one, "adopt")]
    found = [family for family in adopters if family.publishes(config)]
    if len(found) == 1:
        return found[0]
    raise ValueError(
        f"draft {directory.name}, of architecture {config.get('architectures')}, is in a layout of "
        f"{' and '.join(map(name_of, found)) or 'no family'}; wanted one of: {', '.join(map(name_of, adopters))}"
    )


def open_draft(directory: Path, target_dir: Path) -> Draft:
    """Load a draft of whatever family; ValueError as the family's `check`."""
    return family_of(directory).load(directory, target_dir)


def check_draft(directory: Path, like: Path | None, target: TargetCard) -> None:
    """Check a draft of whatever family; see `Family.check`. A swap can't change the family either."""
    family = family_of(directory)
    if like is not None:
        require_family(directory, like)
    family.check(directory, like, target)


def require_family(directory: Path, like: Path) -> None:
    """Raise ValueError if two drafts are not of one family."""
    own, served = name_of(family_of(directory)), name_of(family_of(like))
    if own != served:
        raise ValueError(f"draft {directory.name} is of family {own}, the served draft of {served}")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError if it can't be read or is something else."""
    try:
        value = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"draft {file.parent.name}: {file.name} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"draft {file.parent.name}: {file.name} holds a {type(value).__name__}, wanted an object")
    return value


def own(config: Mapping[str, Any], directory: Path) -> Mapping[str, Any]:
    """Return what a draft's config says under "redraft", nothing in one from elsewhere."""
    own = config.get("redraft", {})
    if not isinstance(own, Mapping):
        raise ValueError(f"draft {directory.name}: config.json has redraft {own!r}; wanted an object")
    return own


def read_vocabulary(directory: Path) -> frozenset[int] | None:
    """Return the target's token ids that a draft can say, None where its files name no part of the vocabulary."""
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            if "token_map" in names:
                return frozenset(tensors.get_tensor("token_map").tolist())
            if "d2t" in names:
                offsets = tensors.get_tensor("d2t")
                return frozenset((offsets + torch.arange(len(offsets))).tolist())
    return None
