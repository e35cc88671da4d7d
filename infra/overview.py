"""What there is and what runs in a home folder: drafts, the query log, the service, the programs of `redraft up`."""

from collections.abc import Sequence

from pydantic import Field

from infra.home import FORMAT_FILE, served_since_ms
from infra.post_promotion import PostPromotionTest, PostPromotionTests
from infra.querylog import LogStats, QueryLog
from infra.registry import Registry, open_registry
from infra.regression_sets import RegressionSet
from infra.rollout_store import ATTACHED, fleets_of
from infra.rollouts import Fleet, Replica
from infra.service_process import MLFLOW, PREFECT, RUNNER, last_status
from infra.settings import Settings
from infra.status import RecentAcceptance, RunningService
from infra.supervisor import STATE, ProcessRecord, UpState, read_state
from infra.trigger_store import TriggerStore
from infra.versions import Version, model_name
from infra.views.gate import DATA
from infra.waiting import Queue, Runner, Waiting, waiting_for
from models.types import Frozen, GateReport

QUARANTINED = "quarantined"
REPORT = "report.html"  # where `redraft report` writes its page in a home, unless told otherwise
NUM_ROWS = 64  # that say how a server's draft does


class DraftOverview(Frozen):
    """A draft in a line; what it does not have is "".

    Attributes:
        rows: first and last row of the query log that it was trained on.
        reasons: why it was refused, left undecided or quarantined.
        returns: which past draft it is and what it was tried again for.
        trained_context: tokens of the longest text that it learnt from, None where it is not known.
    """

    version: int
    champion: bool
    parent: str
    rows: str
    verdict: str
    reasons: str
    returns: str = ""
    trained_context: int | None = None
    tau: dict[str, float]
    target_version: str
    created_ms: int


class Gated(Frozen):
    draft: int
    report: GateReport


class Overview(Frozen):
    """The state of a home folder.

    Attributes:
        target: name and version of the champion target, "" without one.
        last_refresh: the newest draft that a refresh made or tried again.
        last_gate: the newest draft of which a gate's report was kept, and the report.
        service_since_ms: since when a service holds the home, whether it answers yet or not; None without one.
        links: addresses of pages that say more, by their names.
        fleets: replicas of the service, and vLLM servers that `redraft attach` follows, with how far a new champion is
            in them.
        acceptance: a replica's name, then domain, to acceptance in the last rows that its present draft drafted.
    """

    target: str = ""
    drafts: tuple[DraftOverview, ...]
    last_refresh: DraftOverview | None
    last_gate: Gated | None = None
    log: LogStats
    service: RunningService | None
    service_since_ms: int | None = None
    links: dict[str, str] = Field(default_factory=dict)
    fleets: dict[str, Fleet] = Field(default_factory=dict)
    acceptance: dict[str, dict[str, RecentAcceptance]] = Field(default_factory=dict)
    programs: tuple[ProcessRecord, ...]
    waiting: Waiting
    regression_sets: dict[str, RegressionSet] = Field(default_factory=dict)
    post_promotion_test: PostPromotionTest | None = None

    @property
    def attached(self) -> tuple[Replica, ...]:
        """Where the vLLM servers stand that are followed."""
        return tuple(row for name, fleet in self.fleets.items() if name.startswith(ATTACHED) for row in fleet.rows)

    @property
    def champion(self) -> DraftOverview | None:
        return next((draft for draft in self.drafts if draft.champion), None)


def overview(settings: Settings) -> Overview:
    """Look at a home folder; ConnectionError if the registry can't be asked, ValueError as `last_status`."""
    registry = open_registry(settings)
    target, champion, versions = registry.champion("target"), registry.champion("draft"), registry.versions("draft")
    refreshed = [version for version in versions if version.lineage.window or version.lineage.returns]
    state, log, service = read_state(settings.home), QueryLog(settings.querylog), last_status(settings)
    rows, first_ms = log.waiting()
    file = settings.home / FORMAT_FILE
    made = (file if file.is_file() else settings.home).stat()
    trigger = TriggerStore(settings.querylog).state()
    queue = Queue(rows=rows, first_ms=first_ms, unlogged=0 if service is None else service.log.unlogged)
    fleets = fleets_of(settings.querylog)
    replicas = [row for fleet in fleets.values() for row in fleet.rows]
    return Overview(
        target="" if target is None else f"{target.target.name}, version {target.number}",
        drafts=tuple(_draft(version, champion) for version in versions),
        last_refresh=_draft(refreshed[0], champion) if refreshed else None,
        last_gate=_last_gate(registry, versions),
        log=log.stats(),
        service=service,
        service_since_ms=served_since_ms(settings.home),
        links=links(settings, state, champion),
        fleets=fleets,
        acceptance={row.name: _acceptance(log, row) for row in replicas if row.logged_as and row.version},
        programs=() if state is None else state.programs,
        waiting=waiting_for(
            champion, versions, queue, trigger, made.st_mtime_ns // 1_000_000, runner=_runner(settings, state)
        ),
        regression_sets=log.regression_sets.by_domain(),
        post_promotion_test=None if champion is None else PostPromotionTests(settings).of_draft(champion.number),
    )


def _acceptance(log: QueryLog, row: Replica) -> dict[str, RecentAcceptance]:
    draft, counts = int(row.version.partition("-")[0]), dict[str, list[tuple[int, int, int]]]()
    for _, domain, steps, drafted, accepted in log.acceptance_counts(draft, 0, NUM_ROWS, row.logged_as):
        counts.setdefault(domain, []).append((steps, drafted, accepted))
    return {domain: RecentAcceptance.of(of_domain) for domain, of_domain in sorted(counts.items())}


def _last_gate(registry: Registry, drafts: Sequence[Version]) -> Gated | None:
    for draft in drafts:
        if draft.lineage.gate is not None and (report := registry.attached(draft, DATA)) is not None:
            return Gated(draft=draft.number, report=GateReport.model_validate_json(report))
    return None


def _runner(settings: Settings, state: UpState | None) -> Runner | None:
    """Return the program that looks; the supervisor writes its state when it starts one."""
    found = None if state is None else next((one for one in state.programs if one.name == RUNNER), None)
    if found is None:
        return None
    since_ms = (settings.home / STATE).stat().st_mtime_ns // 1_000_000
    return Runner(started=found.pid is not None or found.restarts > 0, since_ms=since_ms)


def links(settings: Settings, state: UpState | None, champion: Version | None) -> dict[str, str]:
    """Return the addresses of pages that say more, by their names."""
    mlflow, prefect = ("" if state is None else state.url(name) for name in (MLFLOW, PREFECT))
    if settings.mlflow_uri.startswith("http") and "@" not in settings.mlflow_uri:  # a password is nobody's to read
        mlflow = settings.mlflow_uri.rstrip("/")
    report = settings.home / REPORT
    drafts = model_name(settings.model_prefix, "draft")
    found = {
        "MLflow": mlflow and f"{mlflow}/#/models/{drafts}{f'/versions/{champion.number}' if champion else ''}",
        "Prefect": prefect and f"{prefect}/runs",
        "report": report.as_uri() if report.is_file() else "",
    }
    return {name: link for name, link in found.items() if link}


def _draft(version: Version, champion: Version | None) -> DraftOverview:
    lineage, window = version.lineage, version.lineage.window
    return DraftOverview(
        version=version.number,
        champion=champion is not None and version.number == champion.number,
        parent="" if lineage.parent is None else str(lineage.parent),
        rows="" if window is None else f"{window.first_seq}–{window.last_seq}",
        verdict=QUARANTINED if version.quarantined else lineage.gate or "",
        reasons=version.quarantined or lineage.gate_reasons,
        returns=lineage.returns,
        trained_context=lineage.trained_context,
        tau=lineage.tau,
        target_version="" if lineage.target_version is None else str(lineage.target_version),
        created_ms=version.created_ms,
    )
