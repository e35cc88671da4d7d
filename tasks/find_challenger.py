"""Find out what the training on a window starts from, and whether a past champion should serve again instead.

The traffic that a past champion was good at may have come back. That is asked only for a domain whose acceptance fell:
else a try would only use up error that all challengers share. One past draft a domain challenges each champion. The
gate tests it as any challenger; if it passes, nothing is trained, and if not, its rows are trained on as ever.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from infra.artifacts import Artifact, open_artifact, publish
from infra.consent import OTHER_DOMAINS
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.regression_sets import FEWEST
from infra.settings import load_settings
from infra.store import ObjectMissing
from infra.versions import (
    Pair,
    Version,
    challenger_to_go_on,
    is_quarantined,
    next_challenger,
    past_champions,
    tried_again,
)
from infra.windows import Window
from models.core.drafting.draft_families import check_draft
from models.core.evaluation.gate import Evidence
from models.core.evaluation.paired import clusters, gain
from models.core.learning.hidden import Sample
from models.recipe import Recipe
from models.targets import describe
from models.types import Frozen
from tasks.claim_window import Parts
from tasks.gate_draft import CHAMPION
from tasks.measure_draft import Scorer
from tasks.stages import run_logger, table, task
from tasks.stages.samples import draw_per_domain, read_samples
from tasks.stages.throttle import device_of
from tasks.trigger.acknowledge import fallen_domains

EVIDENCE = "evidence.json"
MOST = 200  # conversations that past drafts are compared on; a gain worth a return shows on fewer


class Start(Frozen):
    """Where a challenger's next run starts: the checkpoint that it resumes, or the champion, and its weights.

    `state` is the end of the run that made it, None where that is not there and the optimizer starts afresh; `evidence`
    is what is known of the challenger so far.
    """

    version: Version
    files: Artifact
    state: Artifact | None
    evidence: Evidence


@task
def find_challenger(recipe: Recipe, pair: Pair, window: Window) -> Start:
    """Return where the training on a window starts: the champion's challenger, or the champion for a new one.

    A challenger whose evidence is gone, or was found at another K, learns on; its test starts anew, as another
    challenger's.
    """
    registry, champion = open_registry(), pair.draft
    checkpoint, evidence = known_of_challenger(registry, champion.number, window.first_seq, recipe.num_draft_tokens)
    version, files = champion, pair.draft_files
    if checkpoint is not None:
        version, files = checkpoint, publish(registry.download(checkpoint, load_settings().cache), "draft")
    how = "starts" if checkpoint is None else f"goes on from draft {checkpoint.number}"
    run_logger().info("challenger %d of draft %d %s", evidence.challenger, champion.number, how)
    return Start(version=version, files=files, state=_state(version), evidence=evidence)


def known_of_challenger(
    registry: Registry, champion: int, first_seq: int, num_draft_tokens: int
) -> tuple[Version | None, Evidence]:
    """Return the checkpoint that the training on rows from `first_seq` on resumes, if any, and what is known of it."""
    versions = registry.versions("draft")
    checkpoint = challenger_to_go_on(versions, champion, first_seq)
    kept = None if checkpoint is None else registry.attached(checkpoint, EVIDENCE)
    evidence = None if kept is None else Evidence.model_validate_json(kept)
    if evidence is None or evidence.test.bound != num_draft_tokens:
        evidence = Evidence.start(num_draft_tokens, next_challenger(versions, champion))
    return checkpoint, evidence


@task
def start_test(recipe: Recipe, pair: Pair) -> Evidence:
    """Return what is known of a draft that was not gated against the champion before: nothing."""
    return Evidence.start(
        recipe.num_draft_tokens, next_challenger(open_registry().versions("draft"), pair.draft.number)
    )


def _state(version: Version) -> Artifact | None:
    """Return what a version's training left, None if it left nothing or that is no longer there."""
    lineage = version.lineage
    if not lineage.state_uri:
        return None
    state = Artifact(uri=lineage.state_uri, sha256=lineage.state_sha256, kind="state")
    try:
        open_artifact(state)
    except (ValueError, ObjectMissing) as error:
        run_logger().info("the optimizer starts afresh: %s", error)
        return None
    return state


class Past(Frozen):
    """A past champion that is to be tried again, and the domain that fell."""

    version: Version
    files: Artifact
    domain: str


@task
def find_returned(recipe: Recipe, pair: Pair) -> Version | None:
    """Return the past draft that the gate let return before a crash kept it from being promoted, if there is one.

    Where a person has the last word it waits for that, and learning goes on meanwhile.
    """
    if recipe.gate.promote == "approve":
        return None
    versions = open_registry().versions("draft")
    bad = {one.sha256 for one in versions if is_quarantined(one)}
    for domain in fallen_domains():
        found = tried_again(versions, pair.draft.number, domain)
        if found and found.lineage.gate == "passed" and not found.was_champion and found.sha256 not in bad:
            return found
    return None


@task
def find_past(recipe: Recipe, pair: Pair, window: Window, parts: Parts) -> Past | None:
    """Return the past champion that does best in a domain that fell, None if none is shown to beat the champion there.

    They are compared on the window's rows of the domain, one of each cluster. What the window holds out is not among
    them: the gate uses it, and must not find what it was chosen by.
    """
    registry = open_registry()
    versions = registry.versions("draft") if recipe.refresh.pool else []
    fallen = fallen_domains() if len(versions) > 1 else ()
    if not (domains := [domain for domain in fallen if tried_again(versions, pair.draft.number, domain) is None]):
        return None
    seen = {row.id for row in QueryLog(load_settings().querylog).rows(window.first_seq, window.last_seq)}
    rows = [sample for sample in read_samples(parts.samples, "train") if sample.id in seen]
    held_out = read_samples(parts.samples, "held_out")
    domain, samples = max(((name, _of(name, rows)) for name in domains), key=lambda each: len(each[1]))
    if len(samples) < FEWEST or not _of(domain, held_out):
        return None
    past = past_champions(versions, pair.draft, domain, recipe.num_draft_tokens, window)
    files = dict(islice(fitting(registry, pair, past), recipe.refresh.pool))
    if not files:
        return None
    found = _best(recipe, pair, files, samples)
    if found is None:
        run_logger().info("no past draft is better at %s than draft %d", domain, pair.draft.number)
        return None
    return Past(version=next(one for one in past if one.number == found), files=files[found], domain=domain)


def _of(domain: str, samples: Sequence[Sample]) -> list[Sample]:
    """Return a domain's samples, one of each cluster, as many as are compared."""
    of_cluster = {sample.cluster: sample for sample in samples if domain in (OTHER_DOMAINS, sample.domain)}
    return draw_per_domain(list(of_cluster.values()), MOST, seed=0)


def fitting(registry: Registry, pair: Pair, past: Sequence[Version]) -> Iterator[tuple[int, Artifact]]:
    """Yield number and files of the drafts that could be swapped in; of others it says why not."""
    card, cache = describe(pair.target_files.path), load_settings().cache
    for one in past:
        try:
            files = publish(registry.download(one, cache), "draft")
            check_draft(open_artifact(files), pair.draft_files.path, card)
        except (ValueError, OSError) as error:  # deleted, of another family or shape, or not what was registered
            run_logger().info("draft %d can't return: %s", one.number, error)
            continue
        yield one.number, files


def _best(recipe: Recipe, pair: Pair, files: dict[int, Artifact], samples: Sequence[Sample]) -> int | None:
    """Return the past draft whose gain over the champion is the largest, None if it may be none."""
    names = {str(number): one for number, one in files.items()}
    scorer = Scorer(recipe, pair.target_files, device_of(recipe.refresh_distill()), held=True)
    scores = scorer.scores({CHAMPION: pair.draft_files, **names}, samples)
    gains = {number: gain(clusters(scores[CHAMPION], scores[str(number)])) for number in files}
    rows = [{"draft": name, "gain": f"{one.value:+.3f}", "at least": f"{one.low:+.3f}"} for name, one in gains.items()]
    beside = f"accepted tokens a step more than draft {pair.draft.number}, {len(samples)} conversations"
    table("past-drafts", rows, beside)
    best = max(gains, key=lambda number: gains[number].value)
    return best if gains[best].low > 0 else None
