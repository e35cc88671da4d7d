"""Command `redraft`. Wrong input is one clear line on standard error and exit code 2; Ctrl-C is 130.

Torch, Prefect and MLflow take seconds to import, so each command imports what it needs. The settings go into the
environment before that, because these libraries read it when they are imported.
"""

import atexit
import gc
import shlex
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flows.bench import advise, bench
from flows.command import RecipeName, command_of, complete_erasures, logged, open_settings, prepare
from flows.compare import compare
from flows.home_commands import backup, clean, erase, move_home, restore, retain
from flows.key_commands import KEYS, keys
from flows.key_commands import add as add_key
from flows.service_commands import attach, down, logs, record, serve, status, traffic, up
from infra.priority import go_first, lower_session
from infra.settings import load_settings
from infra.views.results import out, working
from models.recipe import DEFAULT_RECIPE, load_recipe, toml

if TYPE_CHECKING:
    from infra.versions import Version

WIDEST = 60
MEASURE = "Measure"

TargetPlace = Annotated[
    str, typer.Option(help="What vLLM loads the target from, a directory or a hub id; by default our own copy.")
]
Licence = Annotated[str, typer.Option("--license", help="For the model card, such as apache-2.0.")]

app = typer.Typer(
    name="redraft",
    help="Keeps the draft model of a speculative-decoding LLM service in step with its traffic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def main() -> None:
    """Run the command line; SIGTERM ends it as Ctrl-C does, so that what it started ends too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # At its end the interpreter would look for garbage among all objects of PyTorch and others, for three seconds.
    atexit.register(gc.freeze)
    warnings.simplefilter("ignore", FutureWarning)  # libraries' words to each other
    app()


def build(
    recipe: RecipeName = DEFAULT_RECIPE,
    plan: Annotated[
        bool, typer.Option("--plan", help="Run nothing: print the whole recipe, and which steps would run.")
    ] = False,
) -> None:
    """Build the target and its first draft, and make them the champions. Finished steps are reused.

    Example: redraft build --recipe tiny
    """
    settings, parsed = prepare(recipe)
    if plan:
        from flows.build import plan as look

        typer.echo(toml(parsed.model_dump(mode="json", exclude_none=True)) + "\n")
        for step, key in look(parsed).items():
            typer.echo(f"# {step}: {f'cached, {key}' if key else 'would run'}")
        return
    lower_session()
    go_first()
    from flows.build import build as flow
    from tasks.check_recipe import require_buildable

    require_buildable.fn(parsed)  # what can't be built fails here in a line, not in the flow with a traceback
    with logged(settings):
        version = flow(parsed)
    _show_draft("built", version)


def refresh(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Train a draft on the requests served since the last refresh, and promote it if it passes the gate.

    Example: redraft refresh --recipe tiny
    """
    settings, parsed = prepare(recipe)
    complete_erasures(settings)
    from flows.refresh import refresh as flow
    from tasks.promote import open_champions

    open_champions.fn()  # with nothing built it fails here in one line, not in the flow with a traceback
    lower_session()
    go_first()

    with logged(settings):
        outcome, version = flow(parsed)
    if version is None:
        out.print(outcome)
    else:
        _show_draft(outcome, version)


def import_draft(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A published draft: its config.json and safetensors.")
    ],
    recipe: RecipeName = DEFAULT_RECIPE,
    promote: Annotated[
        bool, typer.Option("--promote", help="Have the gate compare it with the champion, and promote it if it passes.")
    ] = False,
    num_layers: Annotated[
        int | None,
        typer.Option("--layers", min=1, help="Of a draft in which others are nested, take that of its first layers."),
    ] = None,
) -> None:
    """Register a draft that was trained elsewhere. If no draft is served yet, it becomes the champion.

    Example: redraft import-draft ./my-eagle3-head --promote
    """
    if not directory.is_dir():
        raise ValueError(f"there is no folder {directory}")
    settings, parsed = prepare(recipe)
    from flows.adopt import adopt

    with logged(settings):
        outcome, version = adopt(parsed, directory.absolute(), promote, num_layers)
    _show_draft(outcome, version)
    if outcome == "registered":
        out.print("the champion stays; to have the gate compare this draft with it, add --promote")


def export_draft(
    number: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Number of the draft, see `redraft status`.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
    target: TargetPlace = "",
    licence: Licence = "",
) -> None:
    """Write a draft with its model card so that `vllm serve DIR` serves it with its target, without redraft.

    Example: redraft export-draft 2 ./draft-2 --target HuggingFaceTB/SmolLM2-135M-Instruct
    """
    open_settings()
    from tasks.export_draft import export_draft as write

    directory = directory.absolute()
    target = write.fn(number, directory, target, licence)
    out.print(f"draft {number}: {directory}, for {target}", soft_wrap=True, markup=False)
    out.print(f"serve it: vllm serve {shlex.quote(str(directory))}", soft_wrap=True, markup=False)


def publish(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Gets a directory for each champion.")],
    recipe: RecipeName = DEFAULT_RECIPE,
    target: TargetPlace = "",
    licence: Licence = "",
) -> None:
    """Export each new champion into a folder and name it in champion.json there, until Ctrl-C; you roll it out.

    Example: redraft publish ./drafts --target HuggingFaceTB/SmolLM2-135M-Instruct
    """
    _, parsed = prepare(recipe)
    from infra.store import StoreUnavailable
    from tasks.export_draft import publish_champion

    told = ""
    while True:
        try:
            found = publish_champion.fn(folder.absolute(), target, licence)
            line = "no champion yet" if found is None else f"draft {found.version}: {folder / found.directory}"
        except StoreUnavailable as error:
            line = f"waiting for the registry: {error}"
        if line != told:
            out.print(line, soft_wrap=True, markup=False)
        told = line
        time.sleep(parsed.serve.poll_s)


def import_logs(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", help="JSON Lines, JSON, CSV or Parquet; also in .gz or .zst.")
    ],
    recipe: RecipeName = DEFAULT_RECIPE,
    domain: Annotated[str, typer.Option(help="The domain of all rows; by default each row's own.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Add nothing if any row can't be used.")] = False,
    answer: Annotated[
        bool, typer.Option("--answer", help="Let the target answer prompts without an answer that can be learnt.")
    ] = False,
) -> None:
    """Add requests that were served elsewhere to the query log. You vouch that their owners agreed to training.

    Example: redraft import-logs old.jsonl --domain chat
    """
    _, parsed = prepare(recipe)
    from tasks.import_logs import import_logs as add

    report = add.fn(files, parsed.engine.max_model_len, domain, strict, parsed if answer else None)
    for reason, first in report.first.items():
        typer.echo(f"skipped {report.skipped[reason]} {reason}; the first: {first}", err=True)
    out.print(report.line(), soft_wrap=True, markup=False)
    if report.num_read and sum(report.skipped.values()) == report.num_read:
        hint = "; --answer lets the target answer prompts" if report.lacks_answers and not answer else ""
        raise RuntimeError(f"none of the rows could be used{hint}")


def promote(
    number: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Number of the draft, see `redraft status`.")],
    force: Annotated[
        str, typer.Option(help="Promote it although no gate passed it, for this reason; kept with the version.")
    ] = "",
) -> None:
    """Make a draft the champion. A running service follows within its poll interval.

    Example: redraft promote 3
    """
    open_settings()
    from tasks.promote import promote_version

    _show_draft("promoted", promote_version.fn(number, force))


def rollback(
    quarantine: Annotated[str, typer.Option(help="Never serve the present champion again, for this reason.")] = "",
) -> None:
    """Go back to the previous champion. A running service follows within its poll interval.

    Example: redraft rollback --quarantine "worse on invoices"
    """
    open_settings()
    from tasks.promote import roll_back

    _show_draft("back at", roll_back.fn(quarantine))


def diff(
    first: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Number of a draft.")],
    second: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Number of another.")],
) -> None:
    """Show how two drafts differ: lineage, training window, gate and acceptance.

    Example: redraft diff 2 3
    """
    open_settings()
    from infra.registry import open_registry
    from tasks.promote import differences

    registry = open_registry()
    versions = registry.get("draft", first), registry.get("draft", second)
    table = Table("", f"draft {first}", f"draft {second}")
    for row in differences(*versions):
        table.add_row(*(value if len(value) <= WIDEST else f"{value[:WIDEST]}…" for value in row))
    out.print(table)


def report(
    output: Annotated[
        Path | None, typer.Option(help="File to write; by default report.html in the home folder.")
    ] = None,
) -> None:
    """Write one HTML page: what serves, acceptance, speed, drafts with their gates, the query log.

    Example: redraft report --output page.html
    """
    settings = open_settings()
    from tasks.write_report import write_report

    with working("writing the report"):
        file = write_report.fn(settings, output)
    out.print(f"report: {file}", soft_wrap=True, markup=False)


def demo(recipe: RecipeName = DEFAULT_RECIPE) -> None:
    """Build, serve, change the traffic, refresh, swap the draft while serving, and show what it gained.

    Example: redraft demo --recipe tiny
    """
    settings, parsed = prepare(recipe)
    from flows.demo import demo as run

    with logged(settings):
        run(parsed, settings)


def doctor(
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Check this recipe's models and prompts too, without loading weights.")
    ] = "",
) -> None:
    """Check that this machine can run redraft. Each fault comes with the command that fixes it.

    Example: redraft doctor --recipe tiny
    """
    from infra.doctor import check_environment

    checks = [*check_environment(settings := load_settings())]
    passed = [_show_check(check.name, check.ok, check.found, check.wanted, check.fix) for check in checks]
    if recipe:
        settings.prepare_environment()
        from tasks.check_recipe import check_recipe

        passed += [_show_check(*finding) for finding in check_recipe.fn(load_recipe(recipe))]
    if faults := passed.count(False):
        raise RuntimeError(f"{faults} of {len(passed)} checks failed")


def _show_check(name: str, ok: bool, found: str, wanted: str = "", fix: str = "") -> bool:
    out.print(f"{'ok   ' if ok else 'FAULT'} {name}: {found}", soft_wrap=True, markup=False)
    if not ok and wanted:
        out.print(f"      wanted {wanted}; run: {fix}", soft_wrap=True, markup=False)
    return ok


def _show_draft(outcome: str, version: "Version") -> None:
    from infra.views.overview import taus_in_words

    out.print(f"{outcome}: draft {version.number}, τ {taus_in_words(version.lineage.tau)}")
    if version.lineage.source_reading:
        out.print(f"its files don't say what it reads; measured best: {version.lineage.source_reading}", markup=False)
    if version.lineage.source and (tokens := version.lineage.trained_context):
        out.print(f"its files say that it was made for {tokens:,} tokens; beyond them, acceptance falls")
    for domain, nats in version.lineage.unlike.items():
        out.print(f"imported answers of {domain} are unlike the target's ({nats:+.2f} nats a token): gated by its own")
    if version.lineage.returns:
        out.print(version.lineage.returns, markup=False)
    if outcome in ("refused", "undecided"):
        out.print(version.quarantined or version.lineage.gate_reasons, markup=False)
    if outcome == "outdated":
        out.print("the champion that it was compared with was replaced or quarantined meanwhile; run it again")


def _example(function: Callable[..., None]) -> str:
    return (function.__doc__ or "").partition("Example: ")[2].strip()


# In the order of `redraft --help`.
PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Every day": (build, serve, attach, record, refresh, up, down, status, logs, report, doctor),
    "Drafts": (promote, rollback, diff, import_draft, export_draft, publish, import_logs),
    "Privacy": (erase, retain),
    "Home": (backup, restore, move_home, clean),
    MEASURE: (demo, traffic, advise, compare),
}
for panel, functions in PANELS.items():
    for function in functions:
        command_of(app, panel)(function)
first = [*(functions[0] for functions in PANELS.values()), add_key]
app.info.epilog = "\n".join(["Examples; each command's --help has its own:", *map(_example, first)])
app.add_typer(bench, rich_help_panel=MEASURE)
app.add_typer(keys, rich_help_panel=KEYS)


if __name__ == "__main__":
    main()
