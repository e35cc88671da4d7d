"""Flow `build`: a target, and a first draft for it, from a recipe to the registry."""

from prefect import flow

from infra.artifacts import Artifact
from infra.registry import Version
from tasks.distill_draft import distill_draft
from tasks.generate_answers import generate_answers
from tasks.measure_draft import measure_draft
from tasks.prepare_target import complete_target, prepare_target
from tasks.promote import promote_build
from tasks.recipe import Recipe
from tasks.register import register_draft, register_target
from tasks.select_data import select_data


@flow(name="build")
def build(recipe: Recipe) -> Version:
    """Build what is not there yet, and make it the champion; returns the draft's version."""
    weights = prepare_target(recipe.target)
    target, samples = prepare(recipe, weights)
    draft = distill_draft(recipe, weights, samples)
    measured = measure_draft(recipe, target, draft, samples)
    target_version = register_target(target)
    version = register_draft(recipe, target_version, target, draft, samples, measured)
    promote_build(target_version, version)
    return version


def prepare(recipe: Recipe, weights: Artifact) -> tuple[Artifact, Artifact]:
    """Return the target with its reference outputs, and its answers to the prompts of the first draft's domains."""
    prompts = select_data(recipe.traffic, recipe.seed)
    samples = generate_answers(recipe, weights, prompts)
    return complete_target(weights, samples), samples
