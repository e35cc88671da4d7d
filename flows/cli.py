"""Command `redraft`. What is wrong with the input is one clear line on standard error and exit code 2; Ctrl-C is 130.

Torch, Prefect and MLflow take seconds to import, so each command imports what it needs. The settings go into the
environment before that, because these libraries read it when they are imported.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flows.bench.commands import bench
from flows.command import DEFAULT_RECIPE, RecipeName, command_of
from infra.priority import lower_session
from infra.settings import Settings, load_settings
from tasks.find_comparison import families

if TYPE_CHECKING:
    from flows.traffic import TrafficReport
    from infra.registry import Version
    from tasks.recipe import Recipe

POLL_S = 0.2
WIDEST = 60
# A service drains its streams for 30 s and then takes some seconds to end.
STOP_GRACE_S = 45.0

app = typer.Typer(
    name="redraft",
    help="Keeps the draft model of a speculative-decoding LLM service in step with its traffic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(bench)
command = command_of(app)
out = Console()


def main() -> None:
    """Run the command line; SIGTERM ends it as Ctrl-C does, so that what it started ends too."""
    signal.signal(signal.SIGTERM, _interrupt)
    app()


@command
def build(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build the target and its first draft, and make them the champions; what is there is not made again."""
    _, parsed = _prepare(recipe)
    lower_session()
    from flows.build import build as flow

    _show_draft("built", flow(parsed))


@command
def refresh(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Train on the requests served since the last time; a draft that passes the gate is promoted."""
    _, parsed = _prepare(recipe)
    lower_session()
    from flows.refresh import refresh as flow

    outcome, version = flow(parsed)
    if version is None:
        out.print(outcome)
    else:
        _show_draft(outcome, version)


@command
def import_draft(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="config.json and safetensors of an EAGLE-3 head.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    promote: Annotated[
        bool, typer.Option("--promote", help="Let the gate hold it against the champion, and serve it if it passes.")
    ] = False,
) -> None:
    """Register a draft that was trained elsewhere; where none is served yet it becomes the champion."""
    _, parsed = _prepare(recipe)
    from flows.adopt import adopt

    outcome, version = adopt(parsed, directory.absolute(), promote)
    _show_draft(outcome, version)
    if outcome == "registered":
        out.print("the champion stays; to have this one judged against it, add --promote")


@command
def import_logs(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON Lines, Parquet or CSV.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    domain: Annotated[str, typer.Option(help="Of all rows; by default each row's own.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Add nothing if one row can't be used.")] = False,
) -> None:
    """Add requests that were served elsewhere to the query log; only what its owners agreed to have trained on."""
    _, parsed = _prepare(recipe)
    from tasks.import_logs import import_logs as add

    report = add.fn(files, parsed.engine.max_model_len, domain, strict)
    for example in report.examples:
        typer.echo(f"skipped {example}", err=True)
    out.print(report.line(), soft_wrap=True, markup=False)
    if report.num_read and sum(report.skipped.values()) == report.num_read:
        raise RuntimeError("none of the rows could be used")


@command
def serve(
    recipe: RecipeName = DEFAULT_RECIPE,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="By default the recipe's; 0 takes a free one.")
    ] = None,
) -> None:
    """Serve the champions behind an OpenAI-compatible endpoint, until Ctrl-C."""
    settings, parsed = _prepare(recipe)
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


@command
def traffic(
    recipe: RecipeName = DEFAULT_RECIPE,
    domain: Annotated[str, typer.Option(help="One of the recipe's domains; by default the first.")] = "",
    num_requests: Annotated[int, typer.Option(min=0, help="How many; 0 sends all of the recipe's.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 8,
    url: Annotated[str, typer.Option(help="Of the service; by default that of the one started last.")] = "",
) -> None:
    """Send a recipe's prompts to the running service; report acceptance and failures."""
    settings, parsed = _prepare(recipe)
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


@command
def promote(
    number: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Of the draft, see `redraft status`.")],
    force: Annotated[
        str, typer.Option(help="Why it is promoted although no gate passed it; kept with the version.")
    ] = "",
) -> None:
    """Make a draft the champion; a running service follows within its poll interval."""
    _settings()
    from tasks.promote import promote_version

    _show_draft("promoted", promote_version.fn(number, force))


@command
def rollback(
    quarantine: Annotated[str, typer.Option(help="Why the draft that is left must never be served again.")] = "",
) -> None:
    """Go back to the champion before this one; a running service follows within its poll interval."""
    _settings()
    from tasks.promote import roll_back

    _show_draft("back at", roll_back.fn(quarantine))


@command
def diff(
    first: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Of a draft.")],
    second: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Of another.")],
) -> None:
    """Show in what two drafts differ: lineage, training window, gate and acceptance."""
    _settings()
    from tasks.lineage import open_registry
    from tasks.promote import differences

    registry = open_registry()
    versions = registry.get("draft", first), registry.get("draft", second)
    table = Table("", f"draft {first}", f"draft {second}")
    for row in differences(*versions):
        table.add_row(*(value if len(value) <= WIDEST else f"{value[:WIDEST]}…" for value in row))
    out.print(table)


@command
def up(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Start Prefect, MLflow, the service and the runner of flows in the background; what dies is started again."""
    settings, _ = _prepare(recipe)
    from flows.up import SERVICE, start

    with out.status("starting; redraft logs shows how far it is"):
        state = start(recipe, settings)
    for program in state.programs:
        path = "/v1" if program.name == SERVICE else ""
        out.print(
            f"{program.name:8} {program.url}{path}" if program.url else f"{program.name:8} running", soft_wrap=True
        )


@command
def down() -> None:
    """End what `redraft up` started; running requests get their answers first."""
    settings = _settings()
    from flows.up import stop

    with out.status("stopping"):
        stop(settings)
    out.print("redraft is down")


@command
def logs(
    name: Annotated[str, typer.Argument(help="One of the programs; by default all of them.")] = "",
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines of each.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Show the last lines of the programs' logs."""
    settings = _settings()
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


@command
def status(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show the drafts with lineage and verdict, acceptance by domain, the query log, and what runs where."""
    settings = _settings()
    from flows.overview import overview

    seen = overview(settings)
    if as_json:
        typer.echo(json.dumps(seen))
    else:
        _show_overview(seen)


@command
def report(
    output: Annotated[Path | None, typer.Option(help="The file; by default report.html in the home folder.")] = None,
) -> None:
    """Write one HTML page: what serves, acceptance, speed, drafts with their gates, the query log."""
    settings = _settings()
    from flows.report import write_report

    with out.status("writing the report"):
        file = write_report(settings, output)
    out.print(f"report: {file}", soft_wrap=True, markup=False)


@command
def demo(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build, serve, let the traffic change, refresh, and show what it brought."""
    settings, parsed = _prepare(recipe)
    from flows.demo import demo as run

    run(parsed, settings)


@command
def compare(
    family: Annotated[str, typer.Argument(metavar="FAMILY", help=f"One of: {', '.join(families()) or 'none'}.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    budget: Annotated[
        float, typer.Option(min=0.001, help="How much is trained or calibrated; 1 is minutes for a family.")
    ] = 1.0,
    num_seeds: Annotated[int, typer.Option("--seeds", min=1, help="Below 3 the figures say little.")] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where cells and report lie; by default below the home.")
    ] = None,
) -> None:
    """Measure every method of a family on a recipe's target and text; run again, it goes on with what is missing."""
    settings = _settings()
    from flows.compare import compare as run

    run(family, recipe, settings, budget, num_seeds, output, " ".join(["redraft", *sys.argv[1:]]))


@command
def doctor() -> None:
    """Check that this machine can run redraft; each fault comes with the command that mends it."""
    from infra.doctor import check_environment

    checks = check_environment(load_settings())
    for check in checks:
        out.print(f"{'ok   ' if check.ok else 'FAULT'} {check.name}: {check.found}", soft_wrap=True, markup=False)
        if not check.ok:
            out.print(f"      wanted {check.wanted}; run: {check.fix}", soft_wrap=True, markup=False)
    if faults := sum(not check.ok for check in checks):
        raise RuntimeError(f"{faults} of {len(checks)} checks failed")


def _prepare(recipe: str) -> "tuple[Settings, Recipe]":
    settings = _settings()
    from flows.recipe import load_recipe

    return settings, load_recipe(recipe)


def _settings() -> Settings:
    settings = load_settings()
    settings.prepare_environment()
    settings.home.mkdir(parents=True, exist_ok=True)  # Prefect makes its folder, but not the one above
    from infra.supervisor import read_state

    if (state := read_state(settings.home)) is not None and (prefect := state.url("prefect")):
        os.environ.setdefault("PREFECT_API_URL", f"{prefect}/api")  # flows show up in the server that runs
    return settings


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _taus(version: "Version") -> str:
    return ", ".join(f"{domain} {tau:.2f}" for domain, tau in json.loads(version.tags["tau"]).items())


def _show_draft(outcome: str, version: "Version") -> None:
    out.print(f"{outcome}: draft {version.number}, τ {_taus(version)}")
    if outcome == "refused":
        out.print(version.tags.get("quarantined") or version.tags["gate_reasons"], markup=False)


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
    out.print(
        f"query log: {log['total']} rows, {log['depth']} wait for a refresh, {log['dropped']} dropped; "
        f"{log['per_domain']}"
    )
    service = seen["service"]
    if service is None:
        out.print("service: not running")
    else:
        out.print(
            f"service: {service['url']}/v1, draft {service['draft_version']}, speculating: {service['speculating']}"
        )
        out.print(f"  requests by status {service['requests']}, swaps {service['swaps']}, refused {service['refused']}")
        for domain, figures in service["acceptance"].items():
            out.print(
                f"  {domain}: τ {figures['mean_accepted_length']:.2f} over the last {figures['requests']} requests"
            )
    for program in seen["programs"]:
        how = "running" if program["ready"] else "starting" if program["pid"] else "down, to be started again"
        restarts = f", restarted {program['restarts']} times" if program["restarts"] else ""
        out.print(f"{program['name']}: {how}{restarts} {program['url']}".rstrip(), soft_wrap=True)


def _show_traffic(report: "TrafficReport") -> None:
    tau = "none" if report.tau is None else f"{report.tau:.3f}"
    out.print(f"{report.num_ok} of {report.num_requests} answered, {report.tokens_per_s:.0f} tokens/s, τ {tau}")
    out.print(f"drafts {report.draft_versions}, failures {report.failures}", markup=False)
    if report.num_ok < report.num_requests:
        raise RuntimeError(f"{report.num_requests - report.num_ok} requests failed")


if __name__ == "__main__":
    main()
