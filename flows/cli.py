"""Command `redraft`. What is wrong with the input is one clear line on standard error and exit code 2; Ctrl-C is 130.

Torch, Prefect and MLflow take seconds to import, so each command imports what it needs. The settings go into the
environment before that, because these libraries read it when they are imported.
"""

import json
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.table import Table

from flows.bench.commands import bench
from flows.command import DEFAULT_RECIPE, RecipeName, command_of, open_settings, out, prepare
from flows.service_commands import down, logs, serve, status, traffic, up
from infra.priority import lower_session
from infra.settings import load_settings
from tasks.find_comparison import families

if TYPE_CHECKING:
    from infra.registry import Version

WIDEST = 60

app = typer.Typer(
    name="redraft",
    help="Keeps the draft model of a speculative-decoding LLM service in step with its traffic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Run the command line; SIGTERM ends it as Ctrl-C does, so that what it started ends too."""
    signal.signal(signal.SIGTERM, _interrupt)
    app()


def build(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build the target and its first draft, and make them the champions; what is there is not made again."""
    _, parsed = prepare(recipe)
    lower_session()
    from flows.build import build as flow

    _show_draft("built", flow(parsed))


def refresh(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Train on the requests served since the last time; a draft that passes the gate is promoted."""
    _, parsed = prepare(recipe)
    lower_session()
    from flows.refresh import refresh as flow

    outcome, version = flow(parsed)
    if version is None:
        out.print(outcome)
    else:
        _show_draft(outcome, version)


def import_draft(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="config.json and safetensors of an EAGLE-3 head.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    promote: Annotated[
        bool, typer.Option("--promote", help="Let the gate hold it against the champion, and serve it if it passes.")
    ] = False,
) -> None:
    """Register a draft that was trained elsewhere; where none is served yet it becomes the champion."""
    _, parsed = prepare(recipe)
    from flows.adopt import adopt

    outcome, version = adopt(parsed, directory.absolute(), promote)
    _show_draft(outcome, version)
    if outcome == "registered":
        out.print("the champion stays; to have this one judged against it, add --promote")


def import_logs(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="JSON Lines, Parquet or CSV.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    domain: Annotated[str, typer.Option(help="Of all rows; by default each row's own.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Add nothing if one row can't be used.")] = False,
) -> None:
    """Add requests that were served elsewhere to the query log; only what its owners agreed to have trained on."""
    _, parsed = prepare(recipe)
    from tasks.import_logs import import_logs as add

    report = add.fn(files, parsed.engine.max_model_len, domain, strict)
    for example in report.examples:
        typer.echo(f"skipped {example}", err=True)
    out.print(report.line(), soft_wrap=True, markup=False)
    if report.num_read and sum(report.skipped.values()) == report.num_read:
        raise RuntimeError("none of the rows could be used")


def promote(
    number: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Of the draft, see `redraft status`.")],
    force: Annotated[
        str, typer.Option(help="Why it is promoted although no gate passed it; kept with the version.")
    ] = "",
) -> None:
    """Make a draft the champion; a running service follows within its poll interval."""
    open_settings()
    from tasks.promote import promote_version

    _show_draft("promoted", promote_version.fn(number, force))


def rollback(
    quarantine: Annotated[str, typer.Option(help="Why the draft that is left must never be served again.")] = "",
) -> None:
    """Go back to the champion before this one; a running service follows within its poll interval."""
    open_settings()
    from tasks.promote import roll_back

    _show_draft("back at", roll_back.fn(quarantine))


def diff(
    first: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Of a draft.")],
    second: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Of another.")],
) -> None:
    """Show in what two drafts differ: lineage, training window, gate and acceptance."""
    open_settings()
    from tasks.lineage import open_registry
    from tasks.promote import differences

    registry = open_registry()
    versions = registry.get("draft", first), registry.get("draft", second)
    table = Table("", f"draft {first}", f"draft {second}")
    for row in differences(*versions):
        table.add_row(*(value if len(value) <= WIDEST else f"{value[:WIDEST]}…" for value in row))
    out.print(table)


def report(
    output: Annotated[Path | None, typer.Option(help="The file; by default report.html in the home folder.")] = None,
) -> None:
    """Write one HTML page: what serves, acceptance, speed, drafts with their gates, the query log."""
    settings = open_settings()
    from flows.report import write_report

    with out.status("writing the report"):
        file = write_report(settings, output)
    out.print(f"report: {file}", soft_wrap=True, markup=False)


def demo(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build, serve, let the traffic change, refresh, and show what it brought."""
    settings, parsed = prepare(recipe)
    from flows.demo import demo as run

    run(parsed, settings)


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
    settings = open_settings()
    from flows.compare import compare as run

    run(family, recipe, settings, budget, num_seeds, output, " ".join(["redraft", *sys.argv[1:]]))


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


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _taus(version: "Version") -> str:
    return ", ".join(f"{domain} {tau:.2f}" for domain, tau in json.loads(version.tags["tau"]).items())


def _show_draft(outcome: str, version: "Version") -> None:
    out.print(f"{outcome}: draft {version.number}, τ {_taus(version)}")
    if outcome == "refused":
        out.print(version.tags.get("quarantined") or version.tags["gate_reasons"], markup=False)


# In the order of `redraft --help`.
for function in (
    build, refresh, import_draft, import_logs, serve, traffic, promote, rollback, diff, up, down, logs, status, report,
    demo, compare, doctor,
):  # fmt: skip
    command_of(app)(function)
app.add_typer(bench)


if __name__ == "__main__":
    main()
