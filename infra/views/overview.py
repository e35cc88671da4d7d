"""The state of a home folder as lines and a table on a terminal, for `redraft status`."""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from infra.overview import QUARANTINED, Gated, Overview
from infra.post_promotion import RUNNING, PostPromotionTest
from infra.querylog import LogStats
from infra.regression_sets import SIZE
from infra.rollout_store import ATTACHED
from infra.service_process import ATTACH, SERVICE, START_TIMEOUT_S
from infra.status import RunningService
from infra.trigger_store import duration, now_ms, since
from infra.views.dashboard import verdicts
from infra.views.gate import headline
from infra.windows import MAX_ATTEMPTS


def show_overview(seen: Overview, out: Console) -> None:
    out.print(_drafts(seen) if seen.drafts else "no drafts yet; run: redraft build --recipe FILE")
    if seen.target:
        out.print(f"target: {seen.target}", soft_wrap=True, markup=False)
    if (last := seen.last_refresh) is not None:
        told = "; ".join(filter(None, (last.returns, last.reasons)))
        out.print(f"last refresh: draft {last.version}, {last.verdict}{f': {told}' if told else ''}", markup=False)
    if seen.last_gate is not None:
        out.print(f"last gate: {last_gate(seen.last_gate)}", soft_wrap=True, markup=False)
    for draft in seen.drafts:
        if draft.verdict == QUARANTINED:
            out.print(f"draft {draft.version} is quarantined: {draft.reasons}", markup=False)
    if seen.post_promotion_test is not None:
        out.print(f"post-promotion test: {_progress(seen.post_promotion_test)}", markup=False)
    by_domain = counts(seen.log.per_domain)
    out.print(
        f"query log: {seen.log.total} rows{f' ({by_domain})' if by_domain else ''}, "
        f"{seen.log.depth} waiting for a refresh, {seen.log.dropped} dropped"
    )
    for line in _windows(seen.log):
        out.print(line, markup=False)
    at_ms, sets = now_ms(), seen.regression_sets.items()
    if small := ", ".join(
        f"{name}: {one.size} for {since(one.newest_ms, at_ms)}" for name, one in sets if one.size < SIZE
    ):
        told = f"regression sets that wait for conversations, of {SIZE} each, and stop no draft meanwhile: {small}"
        out.print(told, soft_wrap=True, markup=False)
    out.print(f"waits for {seen.waiting.line(at_ms)}", soft_wrap=True, markup=False)
    if seen.service is not None:
        _show_service(seen.service, {draft.version: draft.trained_context for draft in seen.drafts}, out)
    elif not follows(seen):
        out.print(f"service: {absent(seen)}", soft_wrap=True)
    for name, (state, *figures) in servers(seen).items():
        for line in (f"{name}: {state}", *(f"  {one}" for one in figures)):
            out.print(line, soft_wrap=True, markup=False)
    for program in seen.programs:
        restarts = f", restarted {program.restarts} times" if program.restarts else ""
        state = "down, starts soon" if program.state == "down" else program.state
        out.print(f"{program.name}: {state}{restarts} {program.url}".rstrip(), soft_wrap=True)
    for name, link in seen.links.items():
        out.print(f"{name}: {link}", soft_wrap=True, markup=False)
    if "report" not in seen.links:
        out.print("report: none yet; run: redraft report")


def _drafts(seen: Overview) -> Table:
    table = Table("draft", "", "parent", "rows", "gate", "τ", title="drafts, newest first")
    for one in seen.drafts:
        mark, taus = "champion" if one.champion else "", taus_in_words(one.tau)
        table.add_row(str(one.version), mark, one.parent, one.rows or one.returns, one.verdict, taus)
    return table


def _windows(log: LogStats) -> Iterator[str]:
    if (tried := log.attempt) is not None:
        before = ", the one before failed" if tried.running and tried.error else ""
        state = f"{'running' if tried.running else 'failed'}{before}{f': {tried.error}' if tried.error else ''}"
        yield f"  rows {tried.first_seq}–{tried.last_seq}: attempt {tried.number} of {MAX_ATTEMPTS} {state}"
    for window in log.set_aside:
        since_when = f"{datetime.fromtimestamp(window.time_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"
        rows = f"  rows {window.first_seq}–{window.last_seq} are set aside since {since_when}"
        yield f"{rows}, {window.num_attempts} attempts failed: {window.error}"


def taus_in_words(taus: Mapping[str, float]) -> str:
    return ", ".join(f"{domain} {tau:.2f}" for domain, tau in taus.items())


def counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {number:,}" for name, number in numbers.items())


def _progress(test: PostPromotionTest) -> str:
    if test.blind:
        return test.told()
    how_far = f", {len(test.compared)} of {test.num_wanted} requests" if test.outcome == RUNNING else ""
    return f"draft {test.draft} {test.outcome}{how_far}: {test.told()}"


def last_gate(gated: Gated) -> str:
    return f"draft {gated.draft}. {headline(gated.report)}"


def follows(seen: Overview) -> bool:
    """Return whether vLLM servers of somebody's own serve, or will, in place of a service of ours."""
    return bool(seen.attached) or any(program.name == ATTACH for program in seen.programs)


def servers(seen: Overview) -> dict[str, list[str]]:
    """Return what is told of each replica: where it stands, and then what failed and how much of its draft is accepted.

    A rollout that is on its way comes before the replicas of its fleet.
    """
    told = {}
    for name, fleet in seen.fleets.items():
        kind = "attached server" if name.startswith(ATTACHED) else "replica"
        if fleet.candidate:
            told["rollout"] = [fleet.told()]
        for row in fleet.rows:
            turn = f", wave {row.wave}" if fleet.candidate else ""
            lines = [f"{row.state}, draft {row.version or 'unknown'}{turn}"]
            lines += [f"draft {draft} failed here: {why}" for draft, why in row.failed.items()]
            if row.counts is not None:
                lines.append(f"by its metrics: {row.counts.told()}")
            for domain, figures in seen.acceptance.get(row.name, {}).items():
                tau = f"τ {figures.mean_accepted_length:.2f}"
                lines.append(f"{domain}: {tau} over its last {figures.requests} requests")
            told[f"{kind} {row.name}"] = lines
    return told


def absent(seen: Overview) -> str:
    """Return in words why no service answers."""
    if (since_ms := seen.service_since_ms) is None:
        is_up = any(program.name == SERVICE and program.pid for program in seen.programs)
        return "starting" if is_up else "not running; start it with redraft serve or redraft up"
    passed_s = (now_ms() - since_ms) / 1000
    if passed_s < START_TIMEOUT_S:
        return f"starting, {passed_s:.0f} s"
    return f"does not answer, {duration(passed_s)} after its start; see: redraft logs service"


def _show_service(service: RunningService, trained: Mapping[int, int | None], out: Console) -> None:
    draft = f"draft {service.draft_version}" if service.draft_version else "no draft"
    speculation = "on" if service.speculating else f"off ({service.fallback or 'switched off by an operator'})"
    out.print(f"service: {service.url}/v1, {draft}, speculation {speculation}", soft_wrap=True)
    out.print(f"  engine {service.mode}", markup=False)
    if service.unplanned is not None:
        out.print(f"  steps are not planned: {service.unplanned}", markup=False)
    if service.speculating and (plan := service.throughput) is not None and plan.plain_tokens_per_s:
        gain = plan.tokens_per_s / plan.plain_tokens_per_s
        alone = "nothing" if plan.why == "loses" else "with look-up alone"
        drafts = f"up to {plan.num_draft_tokens} tokens a step" if plan.num_draft_tokens else alone
        out.print(f"  drafts {drafts} ({plan.why}): {gain:.2f}× the tokens without drafts")
    for verdict in verdicts(service).values():
        out.print(f"  {verdict}", soft_wrap=True, markup=False)
    answered = counts(service.requests)
    out.print(f"  {f'answered with {answered}' if answered else 'no requests yet'}; swaps: {service.swaps}")
    tasks = service.failed_tasks.items()
    faults = (
        *(f"failed: background task {name} ({why}); restart the service" for name, why in tasks),
        service.fault and f"broken: {service.fault}",
        service.replacement and f"another replica must take over: {service.replacement}",
        *(f"draft {name} is refused: {why}" for name, why in service.refused.items()),
        *(f"draft {name} will be retried: {why}" for name, why in service.postponed.items()),
    )
    for fault in filter(None, faults):
        out.print(f"  {fault}", markup=False)
    for domain, figures in service.acceptance.items():
        seen = f"over the last {figures.requests} requests that it drafted alone"
        out.print(f"  {domain}: τ {figures.mean_accepted_length:.2f} {seen}")
    for length, figures in service.acceptance_by_context.items():
        most = f"of up to {int(length):,} tokens" if length.isdecimal() else "that are longer"
        out.print(f"  requests {most}: τ {figures.mean_accepted_length:.2f} over the last {figures.requests}")
    learnt = trained.get(service.draft_version or 0)
    if learnt is not None and service.longest_context > learnt:
        told = f"requests have up to {service.longest_context:,} tokens, what the draft learnt from {learnt:,}"
        falls = "beyond them acceptance falls. A refresh learns lengths that one text in 100 has"
        out.print(f"  {told}: {falls}", soft_wrap=True)
    for domain, share in service.coverage.items():
        out.print(f"  {domain}: the draft's vocabulary has {share:.1%} of the tokens of the last answers")
