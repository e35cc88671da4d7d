"""All families of drafts side by side, each trained, searched for or filled first as it needs.

All learn the same: the answers that the served line's first draft was trained on, with the recipe's settings, for a
number of minutes each at most. How a family learns, such as its loss, is its paper's where the recipe does not say it.
A draft that was made is an artifact of the home that the benchmark runs in, under the key of all that it depends on:
one that was interrupted is gone on with, and a finished one is found again.
"""

from collections.abc import Mapping

from infra.artifacts import Artifact, open_artifact
from infra.views.results import out
from models import catalog
from models.drafting.draft_families import family_named
from models.learning import distill
from models.params import BaseParams, validate
from models.recipe import Recipe
from tasks.distill_draft import distill_draft
from tasks.measure.configurations import Configuration, of_served, usual_k


def every_family(recipe: Recipe) -> dict[str, Configuration]:
    """Return the served draft, alone and with look-up, and a new one of each family, of the family's own shape.

    A family that has a vocabulary of its own gets one as large as the served draft's, if that has one.
    """
    k = recipe.num_draft_tokens
    found = of_served(k)
    for name in catalog.names("drafts"):
        fields, served = family_named(name).Params.model_fields, recipe.draft.model_dump()
        shape = served if served["name"] == name else {key: served[key] for key in ("vocab_size",) if key in served}
        draft = catalog.parse("drafts", {"name": name} | {key: shape[key] for key in shape if key in fields})
        found[name] = Configuration(draft=draft, engine={"num_draft_tokens": usual_k(name, k)})
    return found


def is_made(way: Configuration) -> bool:
    """Whether a configuration's draft has to be trained, searched for or filled before it drafts."""
    if isinstance(way.draft, str):
        return False
    family = family_named(way.draft.name)
    return family.TRAINED or hasattr(family, "collect") or hasattr(family, "search")


def make_drafts(
    recipe: Recipe, target: Artifact, samples: Artifact, ways: Mapping[str, Configuration], minutes: float
) -> dict[str, Configuration]:
    """Make the drafts that have to be made, and return the configurations with their directories.

    Args:
        recipe: how drafts are trained.
        target: what they draft for.
        samples: whose training part is learnt.
        ways: name to configuration.
        minutes: of training, of each that is trained; a search and a store take what they take.

    Raises:
        ValueError: a draft can't be made for the target; names the configuration.
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
    """Return the recipe of a configuration's draft."""
    assert isinstance(way.draft, BaseParams)
    assert isinstance(recipe.distill, distill.Params)  # which a recipe's fields can't say without importing torch
    own = validate(distill.Params, way.distill, "distill")
    said = {key: getattr(own, key) for key in way.distill}
    most = min(minutes, recipe.distill.max_minutes or minutes)
    heads = {} if family_named(way.draft.name).TRAINED else {"lengths": None, "verify": None}
    k = way.engine.get("num_draft_tokens", recipe.num_draft_tokens)
    return recipe.model_copy(
        update={
            "draft": way.draft,
            "distill": recipe.distill.model_copy(update={"max_minutes": most, **said, **heads}),
            "engine": recipe.engine.model_copy(update={"num_draft_tokens": k}),
        }
    )
