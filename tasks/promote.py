"""Find out what is served, and change what is to be served."""

import json
from typing import Literal

from infra.artifacts import Artifact, publish
from infra.champions import Outdated
from infra.events import APPROVAL_WANTED, DRAFT_RESOURCE
from infra.registry import open_registry
from infra.settings import load_settings
from infra.versions import COUNT, Lineage, Pair, Version, ancestors, is_quarantined, same_files, trained_on
from infra.windows import Window
from models.recipe import Recipe
from tasks.stages import flow_run_id, run_logger, task

MADE_BY = "made_by"  # tag of a target: the tables of the recipes that it was made by
Outcome = Literal["promoted", "undecided", "refused", "outdated", "already trained", "waits for approval"]


@task
def open_champions() -> Pair:
    """Fetch the target and the draft that are to be served; ValueError as `find_champions`, or if there are none."""
    if (pair := find_champions.fn()) is None:
        raise ValueError("the registry has no champion target and draft yet; run: redraft build --recipe FILE")
    return pair


@task
def find_champions() -> Pair | None:
    """Fetch the target and the draft that are to be served, None if there are none yet.

    ValueError if the draft was made for another target.
    """
    registry, cache = open_registry(), load_settings().cache
    target, draft = registry.champion("target"), registry.champion("draft")
    if target is None or draft is None:
        return None
    if draft.target.sha256 != target.target.sha256:
        raise ValueError(
            f"draft {draft.number} was made for target {draft.lineage.target_version}, "
            f"but target {target.number} is the champion; run: redraft build --recipe FILE"
        )
    return Pair(
        target=target,
        draft=draft,
        target_files=publish(registry.download(target, cache), "target"),
        draft_files=publish(registry.download(draft, cache), "draft"),
    )


def require_target(recipe: Recipe, target: Version) -> None:
    """Raise ValueError if a registered target was made by other tables than a recipe has."""
    known = json.loads(target.tags.get(MADE_BY, "[]"))
    if recipe.target_tables not in known:
        made_by = " and by ".join(map(json.dumps, known)) or "none that is known"
        raise ValueError(
            f"the recipe's target is {json.dumps(recipe.target_tables)}, but target {target.number}, the champion, was "
            f"made by {made_by}; take its recipe, or run: redraft build --recipe FILE"
        )


@task
def promote_build(target: Version, draft: Version) -> None:
    """Make a target and its first draft the champions, unless the champion goes on from that draft.

    A draft from elsewhere has no parents; while it is the target's champion it stays, because a person chose it.
    """
    registry = open_registry()
    with registry.alone():
        champion = registry.champion("draft")
        if champion is not None and draft.number in [one.number for one in ancestors(registry, champion)]:
            run_logger().info("draft %d stays: it descends from draft %d", champion.number, draft.number)
        elif champion is not None and champion.lineage.source and champion.lineage.target_version == target.number:
            run_logger().info("draft %d stays: it came from %s", champion.number, champion.lineage.source)
        else:
            registry.promote("target", target.number)
            registry.promote("draft", draft.number)
            run_logger().info("promoted target %d and draft %d", target.number, draft.number)


@task
def find_candidate(pair: Pair, window: Window) -> Version | None:
    """Return the version that a run before this one trained on the window, if a crash kept it from ending.

    It is the champion or one of its parents, or was trained from the champion; another one goes on from a draft that is
    no longer served, and is left alone.
    """
    registry = open_registry()
    line = {one.number for one in ancestors(registry, pair.draft)}
    found = trained_on(registry.versions("draft"), window)
    return next((one for one in found if one.number in line or one.lineage.parent == pair.draft.number), None)


@task
def find_gated(pair: Pair, target: Version, draft: Artifact) -> Version | None:
    """Return the version of a draft from elsewhere that a run before this one compared with the champion, if any.

    The champion itself needs no verdict. ValueError if it is of another target, so that nothing can be compared.
    """
    if pair.target.number != target.number:
        raise ValueError(
            f"the draft was made for target {target.number}, but target {pair.target.number} is the champion; "
            "import it with that target's recipe, or run: redraft build --recipe FILE"
        )
    if pair.draft.sha256 == draft.sha256:
        return pair.draft
    versions = same_files(open_registry().versions("draft"), draft)
    return next((one for one in versions if one.lineage.gated_against == pair.draft.number), None)


@task
def promote_candidate(pair: Pair, candidate: Version, approve: bool = False) -> Outcome:
    """Promote a candidate that passed its gate against the champion; say what came of it.

    With `approve`, one that passed stays registered until a person promotes it (`promote_version`), and an event tells.

    One that the gate left undecided stays registered, for the next window to go on from. It is "outdated" if that
    champion was replaced, rolled back or quarantined since: then the verdict, a refusal too, says nothing of what is
    served now. The candidate stays registered, and the champion is whatever somebody chose.
    """
    registry = open_registry()
    if candidate.number in [one.number for one in ancestors(registry, pair.draft)]:
        return "already trained"
    try:
        if candidate.lineage.gate != "passed" or is_quarantined(candidate):
            registry.require_champion("draft", pair.draft.number)
            why = candidate.quarantined or candidate.lineage.gate_reasons
            run_logger().info("draft %d is not promoted: %s", candidate.number, why)
            undecided = candidate.lineage.gate == "undecided" and not is_quarantined(candidate)
            return "undecided" if undecided else "refused"
        if approve:
            registry.require_champion("draft", pair.draft.number)
            _ask_for_approval(candidate, pair.draft)
            return "waits for approval"
        registry.promote("draft", candidate.number, expected_champion=pair.draft.number)
    except Outdated as error:
        run_logger().info("draft %d is not promoted: %s", candidate.number, error)
        return "outdated"
    returns = candidate.lineage.returns
    run_logger().info("promoted draft %d%s", candidate.number, f": {returns}" if returns else "")
    return "promoted"


@task
def promote_version(number: int, forced: str = "") -> Version:
    """Promote a draft because somebody wants it, and return it; why it is `forced` is kept with the version.

    Raises:
        ValueError: no gate passed it, it was never the champion and passed against another draft than the present one,
            or its parent is quarantined, and `forced` is empty; it is quarantined itself, or was made for another
            target.
    """
    registry = open_registry()
    version = registry.get("draft", number)
    registry.require_promotable(version)
    lineage, force = version.lineage, "to promote it anyway, give a reason: --force REASON"
    if lineage.gate != "passed" and not forced:
        verdict = f"{lineage.gate}: {lineage.gate_reasons}" if lineage.gate else "none"
        raise ValueError(f"draft {number} passed no gate ({verdict}); {force}")
    parent = None if lineage.parent is None else registry.get("draft", lineage.parent)
    if parent is not None and is_quarantined(parent) and not forced:
        bad = f"draft {parent.number}, which is quarantined: {parent.quarantined}"
        raise ValueError(f"draft {number} was trained from {bad}; {force}")
    expected_champion = None if forced or version.was_champion else lineage.gated_against or lineage.parent
    try:
        registry.promote("draft", number, forced, expected_champion)
    except Outdated as error:
        raise ValueError(f"draft {number} passed its gate, but {error}; {force}") from error
    run_logger().info("promoted draft %d%s", number, f", forced: {forced}" if forced else "")
    return version


@task
def roll_back(quarantine: str = "") -> Version:
    """Go back to the last good champion before this one, and return it; ValueError if there is none.

    `quarantine` says why the draft that is left must never be served again; without a reason it may be.
    """
    version = open_registry().roll_back("draft", quarantine)
    run_logger().info("went back to draft %d", version.number)
    return version


def differences(first: Version, second: Version) -> list[tuple[str, str, str]]:
    """Return name and both values of every tag that differs, the lineage's first."""
    own = {*Lineage.tag_names(), COUNT}
    names = [*Lineage.tag_names(), *sorted((first.tags.keys() | second.tags.keys()) - own)]
    pairs = ((name, first.tags.get(name, ""), second.tags.get(name, "")) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _ask_for_approval(candidate: Version, champion: Version) -> None:
    number = candidate.number
    run_logger().info("draft %d passed its gate and waits for approval: redraft promote %d", number, number)
    if not flow_run_id():
        return  # Prefect would start a server to take the event
    from prefect.events import emit_event

    lineage = candidate.lineage
    told = {"draft": number, "champion": champion.number, "returns": lineage.returns, "tau": lineage.tau}
    resource = {"prefect.resource.id": f"{DRAFT_RESOURCE}.{number}", "prefect.resource.name": f"draft {number}"}
    emit_event(APPROVAL_WANTED, resource, payload=told)
