"""Flow `refresh`: what was served since the last time becomes the next draft, if that is better."""

from prefect import flow

from infra.versions import Pair, Version
from infra.windows import Window
from models.recipe import Recipe
from tasks.claim_window import advance_cursor, claim_window, hold_out, hold_window, leave_window
from tasks.distill_draft import train_challenger
from tasks.find_challenger import find_challenger, find_past, find_returned, start_test
from tasks.gate_draft import gate_draft
from tasks.promote import find_candidate, open_champions, promote_candidate, require_target
from tasks.regenerate import regenerate
from tasks.register import first_samples, register_candidate, register_returned
from tasks.stages import name_run
from tasks.trigger.acknowledge import RefreshOutcome, acknowledged


@flow(name="refresh")
@acknowledged
def refresh(recipe: Recipe) -> tuple[RefreshOutcome, Version | None]:
    """Let a past champion return for what it was good at or, if none does, the champion's challenger learn.

    Returns what came of it, and the draft. A challenger that is "undecided" resumes in the next window; one
    that is "refused" was shown worse, and the next challenger starts from the champion.

    Each step leaves something that the next run finds, and the cursor moves last, so it may be killed anywhere. A
    window that three runs failed on is set aside, so that no window stops the ones after it. One that nothing was
    trained on for the champion of now stays open: its candidate is outdated, or a past draft returns. The next run
    takes the same rows for the draft that is the champion then, unless its line has them by that time.
    """
    pair = open_champions()
    require_target(recipe, pair.target)
    window = claim_window(recipe.refresh)
    if window is None:
        name_run("refresh, nothing to do")
        return "nothing to do", None
    of_rows = f"refresh {window.first_seq}–{window.last_seq}"
    name_run(of_rows)
    with hold_window(window):
        candidate = find_candidate(pair, window) or find_returned(recipe, pair) or _make_candidate(recipe, pair, window)
        outcome = promote_candidate(pair, candidate, recipe.gate.promote == "approve")
        if outcome == "outdated" or candidate.lineage.returns:
            leave_window(window)
        else:
            advance_cursor(window)
    name_run(f"{of_rows} → draft {candidate.number}, {outcome}")
    return outcome, candidate


def _make_candidate(recipe: Recipe, pair: Pair, window: Window) -> Version:
    parts = hold_out(recipe, pair, window, first_samples(pair.draft))
    past = find_past(recipe, pair, window, parts)
    if past is not None:
        gated = gate_draft(recipe, pair, start_test(recipe, pair), past.files, parts, learns=False)
        returned = register_returned(recipe, pair, past, gated)
        if gated.report.verdict == "passed":
            return returned
    start = find_challenger(recipe, pair, window)
    trained = train_challenger(recipe, pair, start, regenerate(recipe, pair, window, parts.samples), window)
    gated = gate_draft(recipe, pair, start.evidence, trained.draft, parts)
    return register_candidate(recipe, pair, start, trained, window, parts.samples, gated)
