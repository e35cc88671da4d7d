"""Hold a promoted draft against the one before it, on requests that it serves, and roll it back if it does worse."""

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from infra.consent import ELSEWHERE, Consent, QueryRow
from infra.home import home_secret
from infra.post_promotion import (
    FAILED,
    PASSED,
    ROLLED_BACK,
    RUNNING,
    SUPERSEDED,
    Compared,
    PostPromotionTest,
    PostPromotionTests,
)
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.rollout_store import note_tested
from infra.settings import Settings, load_settings
from infra.versions import Version
from models.core.drafting.draft_families import open_draft
from models.core.evaluation import post_promotion_test
from models.core.evaluation.paired import Score
from models.core.evaluation.scoring import score
from models.core.learning.hidden import Sample
from models.recipe import Recipe
from models.types import Kind
from tasks.measure_draft import tau_of
from tasks.stages import run_logger, task
from tasks.stages.samples import usable
from tasks.stages.split import cluster_samples
from tasks.stages.throttle import throttled

MAX_ROWS = 1024  # of the log that a look draws from, the newest: a busy service writes more than can be compared
EVIDENCE = "post_promotion_test.json"


@task
def check_promoted_draft(recipe: Recipe, imported: bool = False) -> PostPromotionTest | None:
    """Look once at what the champion has served, and act on what all looks together say.

    Each look draws some of the requests and scores both drafts on them by the target's answers, as the gate does. Of a
    cluster only one request ever counts. Of several replicas the canary serves these requests, and the rest get a draft
    that passed. A loss goes back to the draft before it and quarantines this one, unless it is no longer the champion.
    What is found is kept before anything is done about it; the next look goes on from there.

    Where servers are followed by their metrics no row names a draft. Both drafts are scored on the target's answers,
    whoever drafted them; so rows that were `imported` since the draft was registered do as well, if they are of the
    traffic that these servers have.

    Returns:
        the test of the champion, or of the draft that was just rolled back; None where none of the champion's target
        was served before it.
    """
    settings, registry = load_settings(), open_registry()
    tests = PostPromotionTests(settings)
    tests.sweep()
    for failed in tests.unfinished():
        return _roll_back(registry, tests, failed)
    champion = registry.champion("draft")
    previous = None if champion is None else registry.previous_good(champion)
    if champion is None or previous is None or previous.target.sha256 != champion.target.sha256:
        return None
    test = tests.find(champion.number, previous.number)
    if test is not None and test.outcome == PASSED:
        note_tested(settings.querylog, champion, recipe.serve.rollout)
        return test
    if test is None or test.outcome != RUNNING:  # somebody promoted it again: what it did before is forgiven
        num_wanted = recipe.post_promotion_test.num_requests
        test = PostPromotionTest(draft=champion.number, previous=previous.number, num_wanted=num_wanted)
    with QueryLog(settings.querylog).reading():  # an erasure waits until the look's work folder is gone
        test = _look(recipe, tests, test, (champion, previous), imported)
    if test.outcome == PASSED:
        note_tested(settings.querylog, champion, recipe.serve.rollout)
    return _roll_back(registry, tests, test) if test.outcome == FAILED else test


def _look(
    recipe: Recipe, tests: PostPromotionTests, test: PostPromotionTest, drafts: tuple[Version, Version], imported: bool
) -> PostPromotionTest:
    params, settings, champion = recipe.post_promotion_test, load_settings(), drafts[0]
    log = QueryLog(settings.querylog)
    last_seq = log.last_seq()
    rows = _served(log, champion, last_seq, "full", imported)
    num_unreadable = len(_served(log, champion, last_seq, "metadata", imported))
    test = test.model_copy(update={"num_readable": len(rows), "num_unreadable": num_unreadable})
    if test != tests.find(test.draft, test.previous):
        tests.save(test)
        if test.blind:
            run_logger().info("draft %d can't be tested: %s", test.draft, test.told())
    if not rows:
        return test
    target_dir = _fetched(settings, "target", _target_version(champion))
    rows = _one_of_each_cluster(log, test, rows, target_dir)
    samples, _ = usable(rows, _target_version(champion), recipe.refresh.max_share_per_key, params.per_look)
    samples = samples[: min(params.per_look, test.num_wanted - len(test.compared))]
    now_ms = int(time.time() * 1000)
    if not samples or (len(samples) < params.per_look and now_ms - test.looked_ms < 1000 * params.max_wait_s):
        return test
    seqs = {row.id: row.seq or 0 for row in rows}
    compared = _compare(recipe, tests, samples, seqs, target_dir, drafts)
    test = _concluded(recipe, test, (*test.compared, *compared)).model_copy(update={"looked_ms": now_ms})
    tests.save(test)
    run_logger().info("draft %d, held against draft %d: %s", test.draft, test.previous, test.told())
    return test


def _served(log: QueryLog, draft: Version, last_seq: int, consent: Consent, imported: bool) -> list[QueryRow]:
    def is_served(row: QueryRow) -> bool:
        since = imported and row.id.startswith(ELSEWHERE) and row.time_ms > draft.created_ms
        return (since or row.draft_version == draft.number) and not row.structured

    return [row for row in log.rows(max(1, last_seq - MAX_ROWS + 1), last_seq, consent) if is_served(row)]


def _one_of_each_cluster(
    log: QueryLog, test: PostPromotionTest, rows: Sequence[QueryRow], target_dir: Path
) -> list[QueryRow]:
    """Draw one row of each cluster that was not compared yet; nobody who asks can know which requests count."""
    before = log.rows_of(one.seq for one in test.compared)
    both = [*before, *random.SystemRandom().sample(rows, len(rows))]
    named = [row for row in both if row.prompt_ids]
    asked = [Sample(row.id, row.domain, row.prompt_ids or [], [], cluster=row.group or "") for row in named]
    clustered = cluster_samples(asked, home_secret(load_settings().home), target_dir)
    seen: dict[str, QueryRow] = {}
    for row, one in zip(named, clustered, strict=True):
        seen.setdefault(one.cluster, row)
    compared = {row.seq for row in before}
    return [row for row in seen.values() if row.seq not in compared]


def _target_version(champion: Version) -> int:
    number = champion.lineage.target_version
    assert number is not None, f"draft {champion.number} names no target"
    return number


def _compare(
    recipe: Recipe,
    tests: PostPromotionTests,
    samples: Sequence[Sample],
    seqs: Mapping[str, int],
    target_dir: Path,
    drafts: tuple[Version, Version],
) -> list[Compared]:
    settings = load_settings()

    @throttled
    def scored(draft: Version, work: Path) -> list[Score]:
        opened = open_draft(_fetched(settings, "draft", draft.number), target_dir)
        return score(opened, target_dir, samples, recipe.num_draft_tokens, work, settings.device, recipe.engine.rules)

    with tests.workspace() as work:
        pairs = zip(*(scored(draft, work) for draft in drafts), strict=True)
        return [
            Compared(seq=seqs[new.id], domain=new.domain, tau=tau_of([new]), previous_tau=tau_of([old]))
            for new, old in pairs
        ]


def _concluded(recipe: Recipe, test: PostPromotionTest, compared: tuple[Compared, ...]) -> PostPromotionTest:
    costs = np.array([(1 / one.tau, 1 / one.previous_tau) for one in compared])
    domains, params = [one.domain for one in compared], recipe.post_promotion_test
    found = post_promotion_test.findings(domains, costs, recipe.num_draft_tokens, recipe.gate.floor, params.alpha)
    lost = any(finding.lost for finding in found.values())
    outcome = FAILED if lost else PASSED if len(compared) >= test.num_wanted else RUNNING
    return test.model_copy(update={"compared": compared, "found": found, "outcome": outcome})


def _roll_back(registry: Registry, tests: PostPromotionTests, test: PostPromotionTest) -> PostPromotionTest:
    """Go back to the draft before one that failed; if it is no longer the champion, that stays as it is."""
    if not test.evidence:
        test = test.model_copy(update={"evidence": _record(registry, test)})
        tests.save(test)
    reason = f"{test.told()}; evidence: runs:/{test.evidence}/{EVIDENCE}"
    with registry.alone():
        champion = registry.champion("draft")
        if champion is not None and champion.number == test.draft:
            registry.revert("draft", test.draft, reason)
            run_logger().warning("draft %d is rolled back: %s", test.draft, reason)
        done = registry.get("draft", test.draft).quarantined == reason
    test = test.model_copy(update={"outcome": ROLLED_BACK if done else SUPERSEDED})
    tests.save(test)
    return test


def _record(registry: Registry, test: PostPromotionTest) -> str:
    metrics = {f"tau/{domain or 'all'}": found.tau for domain, found in test.found.items()}
    metrics |= {f"previous_tau/{domain or 'all'}": found.previous_tau for domain, found in test.found.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / EVIDENCE
        file.write_text(test.model_dump_json(indent=1) + "\n")
        params = {"draft": test.draft, "previous": test.previous}
        return registry.store.record_run(f"post-promotion test of draft {test.draft}", params, metrics, [file])


@lru_cache(maxsize=3)
def _fetched(settings: Settings, kind: Kind, number: int) -> Path:
    """Return a version's files, checked once: hashing a large target at every look would take longer than the look."""
    registry = open_registry(settings)
    return registry.download(registry.get(kind, number), settings.cache)
