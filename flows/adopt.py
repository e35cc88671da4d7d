"""Flow `adopt`: a draft that was trained elsewhere, from its directory to the registry."""

from pathlib import Path
from typing import Literal

from prefect import flow

from flows.build import make_target, prepare
from infra.priority import gives_way
from infra.versions import Version
from models.recipe import Recipe
from tasks.adopt_draft import adopt_draft, settle_reading
from tasks.claim_window import hold_out_past, reading_rows
from tasks.find_challenger import start_test
from tasks.gate_draft import gate_draft
from tasks.measure_draft import measure_draft
from tasks.promote import Outcome, find_champions, find_gated, promote_build, promote_candidate
from tasks.register import first_samples, register_draft, register_gated, register_target
from tasks.select_data import select_data

AdoptOutcome = Outcome | Literal["registered"]


@flow(name="adopt")
@gives_way
def adopt(
    recipe: Recipe, source: Path, promote: bool = False, num_layers: int | None = None
) -> tuple[AdoptOutcome, Version]:
    """Register a published draft; where none is served yet it becomes the champion, else the gate must pass it first.

    Without `promote` it is registered and measured only. Of a draft in which others are nested, `num_layers` says
    which.
    """
    prompts = select_data(recipe.traffic, recipe.seed)
    weights = make_target(recipe)
    adopted = adopt_draft(weights, source, num_layers)
    target, samples = prepare(recipe, weights, prompts)
    adopted = settle_reading(recipe, weights, adopted, samples)
    version, pair = register_target(recipe, target), find_champions()
    if pair is not None and promote:
        candidate = find_gated(pair, version, adopted.draft)
        if candidate is None:
            with reading_rows():
                parts = hold_out_past(recipe, pair, first_samples(pair.draft))
                gated = gate_draft(recipe, pair, start_test(recipe, pair), adopted.draft, parts, learns=False)
                candidate = register_gated(recipe, pair, adopted, samples, gated)
        return promote_candidate(pair, candidate), candidate
    measured = measure_draft(recipe, target, adopted.draft, samples)
    draft = register_draft(recipe, version, target, adopted.draft, samples, measured, adopted)
    if pair is not None:
        return "registered", draft
    promote_build(version, draft)
    return "promoted", draft
