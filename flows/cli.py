"""Command `redraft`. What is wrong with the input is one clear line on standard error and exit code 2; Ctrl-C is 130.

Torch, Prefect and MLflow take seconds to import, so each command imports what it needs. The settings go into the
environment before that, because these libraries read it when they are imported.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from infra.settings import Settings, load_settings

if TYPE_CHECKING:
    from flows.traffic import TrafficReport
    from infra.registry import Version
    from tasks.recipe import Recipe

DEFAULT_RECIPE = "smollm2-cpu"
FAILED, USAGE, INTERRUPTED = 1, 2, 130
POLL_S = 0.2
# A service drains its streams for 30 s and then takes some seconds to end.
STOP_GRACE_S = 45.0

app = typer.Typer(
    name="redraft",
    help="Keeps the draft model of a speculative-decoding LLM service in step with its traffic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
out = Console()

RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="A recipe that ships, or the path of a TOML file.")]


def main() -> None:
    """Run the command line."""
    app()


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command with the exit codes of this program."""

    @app.command()
    @wraps(function)
    def wrapped(**options: Any) -> None:
        try:
            function(**options)
        except (ValueError, ConnectionError) as error:  # a registry out of reach is a ConnectionError
            _fail(error, USAGE)
        except (RuntimeError, TimeoutError, FloatingPointError) as error:
            _fail(error, FAILED)
        except KeyboardInterrupt:
            _fail("interrupted", INTERRUPTED)

    return wrapped


@command
def build(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build the target and its first draft, and make them the champions; what is there is not made again."""
    _, parsed = _prepare(recipe)
    from flows.build import build as flow

    _show_draft("built", flow(parsed))


@command
def refresh(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Train on the requests served since the last time; a draft that passes the gate is promoted."""
    _, parsed = _prepare(recipe)
    from flows.refresh import refresh as flow

    outcome, version = flow(parsed)
    if version is None:
        out.print(outcome)
    else:
        _show_draft(outcome, version)


@command
def serve(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Serve the champions behind an OpenAI-compatible endpoint, until Ctrl-C."""
    settings, parsed = _prepare(recipe)
    from flows.serving import SERVED_NAME, start_service

    signal.signal(signal.SIGTERM, _interrupt)
    with out.status("starting the service"):
        child, url = start_service(parsed, settings)
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
def status() -> None:
    """Show the champion and its parents, the last refresh, the query log, and the service if it runs."""
    settings = _settings()
    from flows.serving import service_status
    from infra.querylog import QueryLog
    from infra.registry import Registry

    registry = Registry(settings.mlflow_uri, settings.artifacts / "mlflow")
    champion = registry.champion("draft")
    table = Table("draft", "", "parent", "rows", "gate", "τ", title="drafts, newest first")
    for version in registry.versions("draft"):
        tags = version.tags
        mark = "champion" if champion and version.number == champion.number else ""
        rows = f"{tags['window_first_seq']}–{tags['window_last_seq']}" if tags["window_first_seq"] else ""
        verdict = "quarantined" if "quarantined" in tags else tags["gate"]
        table.add_row(str(version.number), mark, tags["parent"], rows, verdict, _taus(version))
    out.print(table)
    log = QueryLog(settings.querylog).stats()
    out.print(f"query log: {log.total} rows, {log.depth} wait for a refresh, {log.dropped} dropped; {log.per_domain}")
    url, answer = service_status(settings)
    if answer is None:
        out.print("service: not running")
    else:
        out.print(f"service: {url}, draft {answer['draft_version']}, speculating: {answer['speculating']}")
        out.print(f"  requests by status {answer['requests']}, swaps {answer['swaps']}, refused {answer['refused']}")


@command
def demo(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build, serve, let the traffic change, refresh, and show what it brought."""
    settings, parsed = _prepare(recipe)
    from flows.demo import demo as run

    run(parsed, settings)


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
    return settings


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"redraft: {message}", err=True)
    raise typer.Exit(code)


def _taus(version: "Version") -> str:
    return ", ".join(f"{domain} {tau:.2f}" for domain, tau in json.loads(version.tags["tau"]).items())


def _show_draft(outcome: str, version: "Version") -> None:
    out.print(f"{outcome}: draft {version.number}, τ {_taus(version)}")
    if outcome == "refused":
        out.print(version.tags.get("quarantined") or version.tags["gate_reasons"], markup=False)


def _show_traffic(report: "TrafficReport") -> None:
    tau = "none" if report.tau is None else f"{report.tau:.3f}"
    out.print(f"{report.num_ok} of {report.num_requests} answered, {report.tokens_per_s:.0f} tokens/s, τ {tau}")
    out.print(f"drafts {report.draft_versions}, failures {report.failures}", markup=False)
    if report.num_ok < report.num_requests:
        raise RuntimeError(f"{report.num_requests - report.num_ok} requests failed")


if __name__ == "__main__":
    main()
