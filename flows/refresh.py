"""Flow `refresh`: what was served since the last time becomes the next draft, if that is better."""

from typing import Literal

from prefect import flow

from infra.querylog import Window
from infra.registry import Version
from tasks.advance_cursor import advance_cursor
from tasks.claim_window import claim_window, hold_out
from tasks.distill_draft import distill_draft
from tasks.gate_draft import gate_draft
from tasks.lineage import Pair
from tasks.promote import find_candidate, open_champions, promote_candidate
from tasks.recipe import Recipe
from tasks.register import first_samples, register_candidate

Outcome = Literal["promoted", "refused", "already trained", "nothing to do"]


@flow(name="refresh")
def refresh(recipe: Recipe) -> tuple[Outcome, Version | None]:
    """Train on the next window and promote what passes the gate; returns what came of it, and the candidate.

    Each step leaves something that the next run finds, and the cursor moves last, so it may be killed anywhere.
    """
    pair = open_champions()
    window = claim_window(recipe.refresh)
    if window is None:
        return "nothing to do", None
    candidate = find_candidate(pair, window) or _train(recipe, pair, window)
    outcome = promote_candidate(pair, candidate)
    advance_cursor(window)
    return outcome, candidate


def _train(recipe: Recipe, pair: Pair, window: Window) -> Version:
    samples = hold_out(recipe, pair, window, first_samples(pair.draft))
    draft = distill_draft(recipe, pair.target_files, samples, pair.draft_files)
    judged = gate_draft(recipe, pair, draft, samples)
    return register_candidate(recipe, pair, draft, window, samples, judged)
