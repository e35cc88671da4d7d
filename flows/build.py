"""Flow `build`: a target, and a first draft for it, from a recipe to the registry."""

from prefect import flow

from infra.artifacts import Artifact
from infra.priority import gives_way
from infra.versions import Version
from models.recipe import Recipe
from tasks.change_model import CHANGES, change_model
from tasks.distill_draft import distill_draft
from tasks.generate_answers import generate_answers
from tasks.measure_draft import Measured, measure_draft
from tasks.prepare_target import complete_target, prepare_target
from tasks.prepare_text import prepare_text
from tasks.promote import promote_build
from tasks.register import register_draft, register_target
from tasks.select_data import select_data
from tasks.select_text import select_text
from tasks.stages import name_run, planning

FOR_THE_DRAFT = ("prompts", "samples", "complete_target", "draft", "scores", "golden_tau")


@flow(name="build")
@gives_way
def build(recipe: Recipe) -> Version:
    """Build what is not there yet, and make it the champion; returns the draft's version."""
    target, samples, draft, measured = make(recipe)
    target_version = register_target(recipe, target)
    version = register_draft(recipe, target_version, target, draft, samples, measured)
    promote_build(target_version, version)
    name_run(f"build → draft {version.number}")
    return version


def make(recipe: Recipe) -> tuple[Artifact, Artifact, Artifact, Measured]:
    """Return what is registered: the target, its answers, the first draft, and what that accepts."""
    prompts = select_data(recipe.traffic, recipe.seed)  # first, because a source may have too few
    weights = make_target(recipe)
    target, samples = prepare(recipe, weights, prompts)
    draft = distill_draft(recipe, weights, samples)
    return target, samples, draft, measure_draft(recipe, target, draft, samples)


def plan(recipe: Recipe) -> dict[str, str]:
    """Return the steps of `make` to the keys of their results, "" for those that would run; none is run."""
    found, changes = dict[str, str](), ("text", "select", *CHANGES) if recipe.changes_target else ()
    with planning(found):  # needs nothing of the target, nor does the text
        select_data(recipe.traffic, recipe.seed)
    with planning(found):
        if recipe.changes_target:
            prepare_text(recipe.text, recipe.seed)
    with planning(found):
        make(recipe)
    steps = ("target", *(name for name in changes if getattr(recipe, name)), *FOR_THE_DRAFT)
    return {step: found.get(step, "") for step in steps}


def make_target(recipe: Recipe) -> Artifact:
    """Return the target that will be served: the recipe's own, after each stage that the recipe has a table for."""
    target = prepare_target(recipe.target)
    if not recipe.changes_target:
        return target
    text = prepare_text(recipe.text, recipe.seed)
    if recipe.select:
        text = select_text(recipe.select, recipe.seed, target, text)
    for stage in CHANGES:
        if table := getattr(recipe, stage):
            target = change_model(stage, table, recipe.seed, target, text, recipe.train)
    return target


def prepare(recipe: Recipe, weights: Artifact, prompts: Artifact) -> tuple[Artifact, Artifact]:
    """Return the target with its reference outputs, and its answers to the prompts of the first draft's domains."""
    samples = generate_answers(recipe, weights, prompts)
    return complete_target(weights, samples), samples
