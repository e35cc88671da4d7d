"""Find out what is served, and move the alias that says what is to be served."""

from typing import Literal

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, publish
from infra.querylog import Window
from infra.registry import LINEAGE_TAGS, Version, is_quarantined
from infra.settings import load_settings
from tasks.gate_report import PASSED
from tasks.lineage import Pair, ancestors, open_registry, trained_on
from tasks.register import same_files
from tasks.reporting import run_logger

Outcome = Literal["promoted", "refused", "already trained"]


@task(cache_policy=NO_CACHE)
def open_champions() -> Pair:
    """Fetch the target and the draft that are to be served.

    Raises:
        ValueError: there are none yet, or the draft was made for another target.
    """
    pair = find_champions.fn()
    if pair is None:
        raise ValueError("the registry has no champion target and draft yet; run: redraft build")
    return pair


@task(cache_policy=NO_CACHE)
def find_champions() -> Pair | None:
    """Fetch the target and the draft that are to be served, None if there are none yet.

    Raises:
        ValueError: the draft was made for another target.
    """
    registry, cache = open_registry(), load_settings().cache
    target, draft = registry.champion("target"), registry.champion("draft")
    if target is None or draft is None:
        return None
    if draft.tags["target_sha256"] != target.tags["target_sha256"]:
        raise ValueError(
            f"draft {draft.number} was made for target {draft.tags['target_version']}, "
            f"but target {target.number} is the champion; run: redraft build"
        )
    return Pair(
        target=target,
        draft=draft,
        target_files=publish(registry.download(target, cache), "target"),
        draft_files=publish(registry.download(draft, cache), "draft"),
    )


@task(cache_policy=NO_CACHE)
def promote_build(target: Version, draft: Version) -> None:
    """Make a target and its first draft the champions, unless the champion goes on from that draft.

    A draft from elsewhere has no parents; while it is the target's champion it stays, because a person chose it.
    """
    registry = open_registry()
    champion = registry.champion("draft")
    if champion is not None and draft.number in [one.number for one in ancestors(registry, champion)]:
        run_logger().info("draft %d stays: it descends from draft %d", champion.number, draft.number)
    elif champion is not None and "source" in champion.tags and champion.tags["target_version"] == str(target.number):
        run_logger().info("draft %d stays: it came from %s", champion.number, champion.tags["source"])
    else:
        registry.promote("target", target.number)
        registry.promote("draft", draft.number)
        run_logger().info("promoted target %d and draft %d", target.number, draft.number)


@task(cache_policy=NO_CACHE)
def find_candidate(pair: Pair, window: Window) -> Version | None:
    """Return the version that a run before this one trained on the window, if a crash kept it from ending.

    It is the champion or one of its parents, or was trained from the champion; another one goes on from a draft that is
    no longer served, and is left alone.
    """
    registry = open_registry()
    line = {one.number for one in ancestors(registry, pair.draft)}
    found = trained_on(registry.versions("draft"), window)
    return next((one for one in found if one.number in line or one.tags["parent"] == str(pair.draft.number)), None)


@task(cache_policy=NO_CACHE)
def find_judged(pair: Pair, target: Version, draft: Artifact) -> Version | None:
    """Return the version of a draft from elsewhere that a run before this one held against the champion, if any.

    The champion itself needs no verdict.

    Raises:
        ValueError: the champions are of another target than `target`, so nothing can be compared.
    """
    if pair.target.number != target.number:
        raise ValueError(
            f"the draft was made for target {target.number}, but target {pair.target.number} is the champion; "
            "import it with that target's recipe, or run: redraft build"
        )
    if pair.draft.sha256 == draft.sha256:
        return pair.draft
    versions = same_files(open_registry().versions("draft"), draft)
    against = str(pair.draft.number)
    return next((one for one in versions if one.tags.get("gated_against") == against), None)


@task(cache_policy=NO_CACHE)
def promote_candidate(pair: Pair, candidate: Version) -> Outcome:
    """Promote a candidate that passed its gate against the champion; say what came of it."""
    registry = open_registry()
    if candidate.number in [one.number for one in ancestors(registry, pair.draft)]:
        return "already trained"
    if candidate.tags["gate"] != PASSED or is_quarantined(candidate):
        run_logger().info("draft %d is not promoted: %s", candidate.number, _reason(candidate))
        return "refused"
    registry.promote("draft", candidate.number)
    run_logger().info("promoted draft %d", candidate.number)
    return "promoted"


@task(cache_policy=NO_CACHE)
def promote_version(number: int, forced: str = "") -> Version:
    """Promote a draft because somebody wants it, and return it.

    Args:
        number: of the draft.
        forced: the reason why a draft is promoted that no gate passed; kept with the version.

    Raises:
        ValueError: no gate passed it and `forced` is empty, it is quarantined, or it was made for another target.
    """
    registry = open_registry()
    version, target = registry.get("draft", number), registry.champion("target")
    if target is None or version.tags["target_sha256"] != target.tags["target_sha256"]:
        served = "there is none" if target is None else f"that is {target.number}"
        raise ValueError(
            f"draft {number} was made for target {version.tags['target_version']}, not for the champion: {served}"
        )
    if version.tags["gate"] != PASSED and not forced:
        verdict = f"{version.tags['gate']}: {version.tags['gate_reasons']}" if version.tags["gate"] else "none"
        raise ValueError(
            f"draft {number} has no passing gate ({verdict}); to promote it anyway, give a reason: --force REASON"
        )
    registry.promote("draft", number, forced)
    run_logger().info("promoted draft %d%s", number, f", forced: {forced}" if forced else "")
    return version


@task(cache_policy=NO_CACHE)
def roll_back(quarantine: str = "") -> Version:
    """Go back to the last good champion before this one, and return it.

    Args:
        quarantine: why the draft that is left must never be served again; without a reason it may be.

    Raises:
        ValueError: there is no good draft before the champion.
    """
    registry = open_registry()
    left = registry.champion("draft")
    version = registry.roll_back("draft")
    if quarantine and left is not None:
        registry.quarantine("draft", left.number, quarantine)
    run_logger().info("went back to draft %d", version.number)
    return version


def differences(first: Version, second: Version) -> list[tuple[str, str, str]]:
    """Return name and both values of every tag that differs, the lineage's first."""
    names = [*LINEAGE_TAGS, *sorted((first.tags.keys() | second.tags.keys()) - {*LINEAGE_TAGS})]
    pairs = ((name, first.tags.get(name, ""), second.tags.get(name, "")) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2]]


def _reason(candidate: Version) -> str:
    return candidate.tags.get("quarantined") or candidate.tags["gate_reasons"]
