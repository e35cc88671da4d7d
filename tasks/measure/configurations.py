"""Configurations of the reference engine: in a TOML file a table each, with a draft and keys of engine `torch`.

    [suffix-8]
    draft = { name = "suffix" }   # or "served", or a draft's directory
    num_draft_tokens = 8

    [medusa-4]                    # where drafts are made first (`make_drafts`)
    draft = { name = "medusa" }
    distill = { learning_rate = 1e-3 }

Without a file they are the served draft, alone and with look-up, and new ones that need neither training nor a store.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field

from infra.artifacts import Artifact, open_artifact
from infra.views.results import out
from models import catalog
from models.core.drafting.draft_families import class_of, family_named, is_trained
from models.core.drafting.self_draft import TargetRunner
from models.core.drafting.weightless import Weightless
from models.core.layers.decoder import Decoder
from models.core.layers.kernels import engine_dtype
from models.core.learning import distill
from models.drafts import Draft
from models.engines.torch import Params as EngineParams
from models.engines.torch import TorchEngine, open_for
from models.params import BaseParams, validate
from models.recipe import Recipe
from models.targets import describe
from models.types import Frozen
from tasks.distill_draft import distill_draft
from tasks.measure.run import Run
from tasks.promote import open_champions

SERVED = "served"
NUM_DRAFT_TOKENS = 8
# Look-up joined to a draft, each step drafted by what pays more, as the serving engine does.
JOINED = {"lengths": {"name": "goodput"}, "lookup": {"num_tokens": NUM_DRAFT_TOKENS}}
# What is the same for all of them, so that they are compared on one target.
SHARED = ("name", "dtype", "device", "max_model_len")


class Configuration(Frozen):
    """One way of drafting.

    Attributes:
        draft: the served one, a directory, or a new one of a family without weights, of any where drafts are made.
        engine: keys of the reference engine but for what all configurations share.
        distill: keys of a recipe's [distill] that are others for a draft that is made first.
    """

    draft: Annotated[BaseParams, catalog.Method("drafts")] | str
    engine: dict[str, Any] = Field(default_factory=dict)
    distill: dict[str, Any] = Field(default_factory=dict)


class Target(NamedTuple):
    """What is decoded, loaded once for all engines, and the keys of all of them."""

    directory: Path
    decoder: Decoder
    draft_dir: Path
    shared: Mapping[str, Any]

    def engine(self, configuration: Configuration | None) -> TorchEngine:
        """Return an engine that remembers nothing yet, without a draft for None; ValueError if one does not fit."""
        keys = {"name": "torch", **self.shared, **(configuration.engine if configuration else {"num_draft_tokens": 0})}
        params = catalog.parse("engines", keys)
        assert isinstance(params, EngineParams)
        draft, directory = (None, None) if configuration is None else self._open(configuration.draft)
        return TorchEngine(self.decoder, self.directory, draft, directory, params)

    def _open(self, named: BaseParams | str) -> tuple[Draft, Path | None]:
        if isinstance(named, str):
            directory = self.draft_dir if named == SERVED else Path(named)
            return open_for(self.decoder, directory, self.directory), directory
        counts = np.zeros(describe(self.directory).vocab_size, np.int64)
        return family_named(named.name).create(named, self.directory, counts), None


def open_target(run: Run) -> Target:
    """Load the served target for engines that use all cores of this machine."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    pair, device, engine = open_champions.fn(), run.settings.device, run.recipe.engine
    directory, dtype = pair.target_files.path, engine_dtype(engine, device)
    shared = {"dtype": dtype, "device": device, "max_model_len": engine.max_model_len}
    return Target(directory, Decoder.load(directory, getattr(torch, dtype), device), pair.draft_files.path, shared)


def of_served(served_k: int) -> dict[str, Configuration]:
    """Return the served draft alone, and with look-up joined to it as it is served."""
    engine = {"num_draft_tokens": served_k}
    return {
        "served draft": Configuration(draft=SERVED, engine=engine),
        "served draft, look-up": Configuration(draft=SERVED, engine={**engine, **JOINED}),
    }


def read_configurations(file: Path | None, served_k: int, makes: bool = False) -> dict[str, Configuration]:
    """Return name to configuration, without a file what there is without training.

    Where drafts are made first, new drafts of families that are trained may be named. ValueError names the
    configuration if one is wrong, or the file if it can't be read.
    """
    if file is None:
        free = (name for name in catalog.names("drafts") if not is_trained(family_named(name)))
        return of_served(served_k) | {
            name: _new({"name": name}, served_k) for name in free if not hasattr(family_named(name), "collect")
        }
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} can't be read as TOML: {error}") from error
    if not tables:
        raise ValueError(f"{file} has no table; wanted one for each configuration")
    return {name: _configuration(table, f"{file.name}: [{name}]", makes) for name, table in tables.items()}


def _new(table: Mapping[str, Any], served_k: int) -> Configuration:
    """Return a new draft that drafts as many tokens as it is served, or many where they cost no pass of a model."""
    draft = catalog.parse("drafts", table)
    kind = class_of(family_named(draft.name))
    many = issubclass(kind, Weightless) and not issubclass(kind, TargetRunner)
    return Configuration(draft=draft, engine={"num_draft_tokens": NUM_DRAFT_TOKENS if many else served_k})


def _configuration(table: object, where: str, makes: bool) -> Configuration:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: wanted a table, got {table!r}")
    keys = dict(table)
    if "draft" not in keys:
        raise ValueError(f'{where}: key "draft" is missing; wanted "{SERVED}", a directory, or a table with a name')
    draft, taught = keys.pop("draft"), keys.pop("distill", {})
    if shared := sorted(keys.keys() & set(SHARED)):
        raise ValueError(f'{where}: key "{shared[0]}" is the recipe\'s, the same for all configurations')
    try:
        if isinstance(draft, Mapping):
            draft = catalog.parse("drafts", draft)
        trained = isinstance(draft, BaseParams) and is_trained(family_named(draft.name))
        if trained and not makes:
            raise ValueError(
                f'a draft of family {draft.name} has to be trained; wanted "{SERVED}" or a directory, or bench '
                "specbench --train, which makes it"
            )
        if taught and not trained:
            raise ValueError('key "distill" is for new drafts that are trained')
        catalog.parse("engines", {"name": "torch", **keys})
        found = validate(Configuration, {"draft": draft, "engine": keys, "distill": taught}, "configuration")
        validate(distill.Params, found.distill, "distill")
        return found
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def every_family(recipe: Recipe) -> dict[str, Configuration]:
    """Return the served draft, alone and with look-up, and a new one of each family, of the family's own shape.

    A vocabulary of its own is as large as the served draft's, if that has one.
    """
    k = recipe.num_draft_tokens
    found = of_served(k)
    for name in catalog.names("drafts"):
        fields, served = family_named(name).Params.model_fields, recipe.draft.model_dump()
        shape = served if served["name"] == name else {key: served[key] for key in ("vocab_size",) if key in served}
        found[name] = _new({"name": name} | {key: shape[key] for key in shape if key in fields}, k)
    return found


def is_made(way: Configuration) -> bool:
    """Whether a configuration's draft has to be trained, searched for or filled before it drafts."""
    family = None if isinstance(way.draft, str) else family_named(way.draft.name)
    return family is not None and (is_trained(family) or hasattr(family, "collect") or hasattr(family, "search"))


def make_drafts(
    recipe: Recipe, target: Artifact, samples: Artifact, ways: Mapping[str, Configuration], minutes: float
) -> dict[str, Configuration]:
    """Make the drafts that have to be made, and return the configurations with their directories.

    Each that is trained is, for so many minutes; a search and a store take what they take. ValueError names the
    configuration of which a draft can't be made for the target.
    """
    made = dict(ways)
    for name, way in ways.items():
        if is_made(way):
            out.print(f"{name}: its draft is made, unless it was", markup=False, highlight=False)
            try:
                draft = distill_draft.fn(_recipe(recipe, way, minutes), target, samples)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            made[name] = way.model_copy(update={"draft": str(open_artifact(draft)), "distill": {}})
    return made


def _recipe(recipe: Recipe, way: Configuration, minutes: float) -> Recipe:
    assert isinstance(way.draft, BaseParams)
    assert isinstance(recipe.distill, distill.Params)  # which a recipe's fields can't say without importing torch
    own = validate(distill.Params, way.distill, "distill")
    said = {key: getattr(own, key) for key in way.distill}
    changed = {"max_minutes": min(minutes, recipe.distill.max_minutes or minutes), **said}
    changed |= {} if is_trained(family_named(way.draft.name)) else {"lengths": None, "verify": None}
    k = way.engine.get("num_draft_tokens", recipe.num_draft_tokens)
    return recipe.model_copy(
        update={
            "draft": way.draft,
            "distill": recipe.distill.model_copy(update=changed),
            "engine": recipe.engine.model_copy(update={"num_draft_tokens": k}),
        }
    )
