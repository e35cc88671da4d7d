"""The commands of `redraft` about what runs: start, end and watch it, and send it traffic; `flows.cli` adds them."""

import asyncio
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flows.command import DEFAULT_RECIPE, RecipeName, open_settings, out, prepare

if TYPE_CHECKING:
    from flows.traffic import TrafficReport

POLL_S = 0.2
# A service drains its streams for 30 s and then takes some seconds to end.
STOP_GRACE_S = 45.0


def serve(
    recipe: RecipeName = DEFAULT_RECIPE,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="By default the recipe's; 0 takes a free one.")
    ] = None,
) -> None:
    """Serve the champions behind an OpenAI-compatible endpoint, until Ctrl-C."""
    settings, parsed = prepare(recipe)
    if port is not None:
        parsed = parsed.model_copy(update={"serve": parsed.serve.model_copy(update={"port": port})})
    from flows.serving import SERVED_NAME, start_service

    with out.status("starting the service"):
        child, url = start_service(parsed, settings, os.environ.get("PREFECT_API_URL", ""))
    try:
        out.print(f'serving model "{SERVED_NAME}" on {url}/v1, log in {child.log_path}', soft_wrap=True)
        while child.poll() is None:
            time.sleep(POLL_S)
        raise RuntimeError(f"the service ended with {child.poll()}\n{child.tail()}")
    finally:
        child.stop(STOP_GRACE_S)


def traffic(
    recipe: RecipeName = DEFAULT_RECIPE,
    domain: Annotated[str, typer.Option(help="One of the recipe's domains; by default the first.")] = "",
    num_requests: Annotated[int, typer.Option(min=0, help="How many; 0 sends all of the recipe's.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    url: Annotated[str, typer.Option(help="Of the service; by default that of the one started last.")] = "",
) -> None:
    """Send a recipe's prompts to the running service; report acceptance and failures."""
    settings, parsed = prepare(recipe)
    from flows.serving import SERVED_NAME, last_url
    from flows.traffic import send, summarise
    from tasks.select_data import choose_prompts

    domain = domain or next(iter(parsed.traffic))
    if domain not in parsed.traffic:
        raise ValueError(f'recipe {parsed.name} has no domain "{domain}"; there are: {", ".join(parsed.traffic)}')
    prompts = choose_prompts(domain, parsed.traffic[domain], parsed.seed)["requests"]
    if num_requests > len(prompts):
        raise ValueError(f'recipe {parsed.name} has {len(prompts)} requests of domain "{domain}", got {num_requests}')
    prompts = prompts[: num_requests or None]
    started_s = time.monotonic()
    columns = (TextColumn(f"{domain} traffic"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out) as bar:
        task = bar.add_task(domain, total=len(prompts))
        answers = asyncio.run(
            send(
                prompts,
                url or last_url(settings),
                concurrency=concurrency,
                max_tokens=parsed.generate.max_tokens,
                model=SERVED_NAME,
                api_key=settings.api_keys[0] if settings.api_keys else None,
                on_answer=lambda _: bar.advance(task),
            )
        )
    _show_traffic(summarise(answers, time.monotonic() - started_s))


def up(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Start Prefect, MLflow, the service and the runner of flows in the background; what dies is started again."""
    settings, _ = prepare(recipe)
    from flows.up import SERVICE, start

    with out.status("starting; redraft logs shows how far it is"):
        state = start(recipe, settings)
    for program in state.programs:
        path = "/v1" if program.name == SERVICE else ""
        out.print(
            f"{program.name:8} {program.url}{path}" if program.url else f"{program.name:8} running", soft_wrap=True
        )


def down() -> None:
    """End what `redraft up` started; running requests get their answers first."""
    settings = open_settings()
    from flows.up import stop

    with out.status("stopping"):
        stop(settings)
    out.print("redraft is down")


def logs(
    name: Annotated[str, typer.Argument(help="One of the programs; by default all of them.")] = "",
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the last lines of the programs' logs."""
    settings = open_settings()
    from infra.logs import follow_logs, last_lines

    files = sorted((settings.home / "logs").glob(f"{name or '*'}.log"))
    if not files:
        known = ", ".join(sorted(file.stem for file in (settings.home / "logs").glob("*.log"))) or "none"
        raise ValueError(f'there is no log "{name}"; there are: {known}')
    for file in files:
        for line in last_lines(file, num_lines):
            typer.echo(f"{file.stem}: {line}")
    if follow:
        for file, line in follow_logs(files):
            typer.echo(f"{file.stem}: {line}")


def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show the drafts with lineage and verdict, acceptance by domain, the query log, and what runs where."""
    settings = open_settings()
    from flows.overview import overview

    seen = overview(settings)
    if as_json:
        typer.echo(json.dumps(seen))
    else:
        _show_overview(seen)


def _show_overview(seen: dict[str, Any]) -> None:
    table = Table("draft", "", "parent", "rows", "gate", "τ", title="drafts, newest first")
    for draft in seen["drafts"]:
        mark = "champion" if draft["champion"] else ""
        taus = ", ".join(f"{domain} {tau:.2f}" for domain, tau in draft["tau"].items())
        table.add_row(str(draft["version"]), mark, draft["parent"], draft["rows"], draft["verdict"], taus)
    out.print(table)
    if (last := seen["last_refresh"]) is not None:
        out.print(f"last refresh: draft {last['version']}, {last['verdict']} {last['reasons']}".rstrip(), markup=False)
    log = seen["log"]
    by_domain = _counts(log["per_domain"])
    out.print(
        f"query log: {log['total']} rows{f' ({by_domain})' if by_domain else ''}, {log['depth']} wait for a refresh, "
        f"{log['dropped']} dropped"
    )
    _show_service(seen["service"])
    for program in seen["programs"]:
        how = "running" if program["ready"] else "starting" if program["pid"] else "down, to be started again"
        restarts = f", restarted {program['restarts']} times" if program["restarts"] else ""
        out.print(f"{program['name']}: {how}{restarts} {program['url']}".rstrip(), soft_wrap=True)


def _show_service(service: dict[str, Any] | None) -> None:
    if service is None:
        out.print("service: not running")
        return
    draft = f"draft {service['draft_version']}" if service["draft_version"] else "no draft"
    speculation = "on" if service["speculating"] else f"off ({service['fallback'] or 'an operator wants it'})"
    out.print(f"service: {service['url']}/v1, {draft}, speculation {speculation}", soft_wrap=True)
    answered = _counts(service["requests"])
    out.print(f"  {f'answered with {answered}' if answered else 'nothing answered yet'}; swaps: {service['swaps']}")
    for name, why in service["refused"].items():
        out.print(f"  draft {name} is refused: {why}", markup=False)
    for name, why in service["postponed"].items():
        out.print(f"  draft {name} is tried again: {why}", markup=False)
    for domain, figures in service["acceptance"].items():
        out.print(f"  {domain}: τ {figures['mean_accepted_length']:.2f} over the last {figures['requests']} requests")


def _counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {number:,}" for name, number in numbers.items())


def _show_traffic(report: "TrafficReport") -> None:
    tau = "none" if report.tau is None else f"{report.tau:.3f}"
    out.print(f"{report.num_ok} of {report.num_requests} answered, {report.tokens_per_s:.0f} tokens/s, τ {tau}")
    if report.draft_versions:
        out.print(f"answered with draft {_counts(report.draft_versions)}", markup=False)
    if report.failures:
        out.print(f"failed with {_counts(report.failures)}", markup=False)
    if report.num_ok < report.num_requests:
        raise RuntimeError(f"{report.num_requests - report.num_ok} requests failed")
