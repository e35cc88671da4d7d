"""What tests of tasks begin with: recipes, and artifacts as the tasks before would have made them."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

from infra.artifacts import Artifact, publish, staged
from infra.consent import QueryRow
from infra.versions import Pair, Version
from models.core.learning.hidden import Sample
from models.recipe import Recipe, parse_recipe, shipped_recipes
from tasks.stages.samples import write_samples
from tests.models.drafts.answered import answer_all, prompts

TABLES = tomllib.loads(shipped_recipes()["tiny"].read_text())


def recipe_of(shipped: Mapping[str, Any] = TABLES, **tables: Any) -> Recipe:
    """Parse a recipe of which some tables are others; None leaves one out."""
    given = {**shipped, **tables}
    return parse_recipe({"name": "r", **{key: table for key, table in given.items() if table is not None}}, "r")


def changed(recipe: Recipe, **tables: Mapping[str, Any]) -> Recipe:
    """Return a recipe of which some keys of some tables are others."""
    new = {name: getattr(recipe, name).model_copy(update=dict(keys)) for name, keys in tables.items()}
    return recipe.model_copy(update=new)


def row_of(id: str, **given: Any) -> QueryRow:
    """A row of the log that the first target answered with the first draft, of which the rest is given."""
    versions = {"scrubber_revision": 1, "target_version": 1, "draft_version": 1}
    served = {"time_ms": 0, "domain": "code", "consent": "full", "finish_reason": "stop", "speculating": True}
    return QueryRow(**{"id": id, **served, **versions, **given})


def target_files(target: Path, folder: Path) -> Artifact:
    """Copy a target's files to where nothing is yet."""
    with staged(folder) as directory:
        copytree(target, directory, dirs_exist_ok=True, ignore=ignore_patterns("manifest.json"))
    return publish(folder, "target")


def samples_files(folder: Path, train: Iterable[Sample], held_out: Iterable[Sample] = ()) -> Artifact:
    """Write samples to where nothing is yet."""
    with staged(folder) as directory:
        write_samples(directory, "train", train)
        write_samples(directory, "held_out", held_out)
    return publish(folder, "samples")


def said_by(target: Artifact, number: int) -> list[Sample]:
    """Return a target's answers to the first prompts, named by their numbers."""
    answered = answer_all(target.path, None, prompts(number))
    return [Sample(one.request_id, "chat", [*one.prompt_ids], [*one.token_ids]) for one in answered]


def pair_of(target: Artifact, draft: Artifact) -> Pair:
    """Return files as if they were the champions', both of number 1."""
    version = Version(kind="target", number=1, sha256="0" * 64, tags={}, created_ms=0)
    return Pair(target=version, draft=version, target_files=target, draft_files=draft)
