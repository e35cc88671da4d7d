"""Flow `refresh`: what was served since the last time becomes the next draft, if that is better."""

from prefect import flow

from infra.registry import Pair, Version
from infra.windows import Window
from models.recipe import Recipe
from tasks.advance_cursor import advance_cursor
from tasks.claim_window import claim_window, hold_out, hold_window, leave_window
from tasks.distill_draft import train_challenger
from tasks.find_challenger import find_challenger
from tasks.gate_draft import gate_draft
from tasks.promote import find_candidate, open_champions, promote_candidate
from tasks.register import first_samples, register_candidate
from tasks.trigger.acknowledge import RefreshOutcome, acknowledged


@flow(name="refresh")
@acknowledged
def refresh(recipe: Recipe) -> tuple[RefreshOutcome, Version | None]:
    """Let the champion's challenger learn from the next window, and promote it once the gate passes it.

    Returns what came of it, and the snapshot. One that is "undecided" is gone on with in the next window; one that is
    "refused" was shown worse, and the next challenger starts from the champion.

    Each step leaves something that the next run finds, and the cursor moves last, so it may be killed anywhere. A
    window that three runs failed on is set aside, so that no window stops the ones after it. One whose candidate is
    outdated stays open: the next run takes the same rows for the draft that is the champion then, unless its line has
    them by that time.
    """
    pair = open_champions()
    window = claim_window(recipe.refresh)
    if window is None:
        return "nothing to do", None
    with hold_window(window):
        candidate = find_candidate(pair, window) or _train(recipe, pair, window)
        outcome = promote_candidate(pair, candidate, recipe.gate.promote == "approve")
        if outcome == "outdated":
            leave_window(window)
        else:
            advance_cursor(window)
    return outcome, candidate


def _train(recipe: Recipe, pair: Pair, window: Window) -> Version:
    start = find_challenger(recipe, pair, window)
    parts = hold_out(recipe, pair, window, first_samples(pair.draft))
    trained = train_challenger(recipe, pair, start, parts.samples)
    judged = gate_draft(recipe, pair, start.evidence, trained.draft, parts)
    return register_candidate(recipe, pair, start, trained, window, parts.samples, judged)
