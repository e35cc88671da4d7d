"""What there is and what runs in a home folder: drafts, the query log, the service, the programs of `redraft up`."""

from pydantic import Field

from infra.home import FORMAT_FILE
from infra.post_promotion import PostPromotionTest, PostPromotionTests
from infra.querylog import LogStats, QueryLog
from infra.registry import open_registry
from infra.regression_sets import RegressionSet
from infra.rollouts import AttachedServer, attached_servers
from infra.service_process import last_status
from infra.settings import Settings
from infra.status import DomainAcceptance, RunningService
from infra.supervisor import ProcessRecord, read_state
from infra.triggerfile import TriggerFile
from infra.versions import Version
from infra.waiting import Queue, Waiting, waiting_for
from models.types import Frozen

QUARANTINED = "quarantined"
NUM_ROWS = 64  # that say how a server's draft does


class DraftOverview(Frozen):
    """A draft in a line; what it does not have is "".

    Attributes:
        rows: first and last row of the query log that it was trained on.
        reasons: why it was refused, left undecided or quarantined.
        returns: which past draft it is and what it was tried again for.
    """

    version: int
    champion: bool
    parent: str
    rows: str
    verdict: str
    reasons: str
    returns: str = ""
    tau: dict[str, float]
    target_version: str
    created_ms: int


class Overview(Frozen):
    """The state of a home folder.

    Attributes:
        last_refresh: the newest draft that a refresh made or tried again.
        attached: vLLM servers whose draft `redraft attach` keeps at the champion now.
        attached_acceptance: server's URL, then domain, to acceptance in the last rows that its present draft drafted.
    """

    drafts: tuple[DraftOverview, ...]
    last_refresh: DraftOverview | None
    log: LogStats
    service: RunningService | None
    attached: tuple[AttachedServer, ...] = ()
    attached_acceptance: dict[str, dict[str, DomainAcceptance]] = Field(default_factory=dict)
    programs: tuple[ProcessRecord, ...]
    waiting: Waiting
    regression_sets: dict[str, RegressionSet] = Field(default_factory=dict)
    post_promotion_test: PostPromotionTest | None = None

    @property
    def champion(self) -> DraftOverview | None:
        return next((draft for draft in self.drafts if draft.champion), None)


def overview(settings: Settings) -> Overview:
    """Look at a home folder; ConnectionError if the registry can't be asked, ValueError as `last_status`."""
    registry = open_registry(settings)
    champion, versions = registry.champion("draft"), registry.versions("draft")
    refreshed = [version for version in versions if version.lineage.window or version.lineage.returns]
    state, log, service = read_state(settings.home), QueryLog(settings.querylog), last_status(settings)
    rows, first_ms = log.waiting()
    file = settings.home / FORMAT_FILE
    made = (file if file.is_file() else settings.home).stat()
    trigger = TriggerFile(settings.querylog).state()
    queue = Queue(rows=rows, first_ms=first_ms, unlogged=0 if service is None else service.log.unlogged)
    attached = attached_servers(settings.home)
    return Overview(
        drafts=tuple(_draft(version, champion) for version in versions),
        last_refresh=_draft(refreshed[0], champion) if refreshed else None,
        log=log.stats(),
        service=service,
        attached=attached,
        attached_acceptance={row.server: _acceptance(log, row) for row in attached if row.name and row.version},
        programs=() if state is None else state.programs,
        waiting=waiting_for(champion, versions, queue, trigger, made.st_mtime_ns // 1_000_000),
        regression_sets=log.regression_sets.by_domain(),
        post_promotion_test=None if champion is None else PostPromotionTests(settings).of_draft(champion.number),
    )


def _acceptance(log: QueryLog, row: AttachedServer) -> dict[str, DomainAcceptance]:
    draft, counts = int(row.version.partition("-")[0]), dict[str, list[tuple[int, int, int]]]()
    for _, domain, steps, drafted, accepted in log.acceptance_counts(draft, 0, NUM_ROWS, row.name):
        counts.setdefault(domain, []).append((steps, drafted, accepted))
    return {domain: DomainAcceptance.of(of_domain) for domain, of_domain in sorted(counts.items())}


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
        tau=lineage.tau,
        target_version="" if lineage.target_version is None else str(lineage.target_version),
        created_ms=version.created_ms,
    )
