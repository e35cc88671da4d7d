"""The commands that keep a home, bring it back, and erase what was logged; `flows.cli` adds them."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import RecipeName, open_settings, prepare
from infra.views.results import out, working
from models.recipe import DEFAULT_RECIPE

if TYPE_CHECKING:
    from infra.erasures import Certificate
    from infra.settings import Settings

WaitS = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait for a refresh that is reading rows; then run it again.")
]


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; it holds what people wrote.")],
) -> None:
    """Back up the home into one file: registry, drafts, query log, keys' hashes. A running service keeps serving.

    Example: redraft backup ../redraft-monday.tar
    """
    settings = open_settings()
    from infra.backup import back_up

    with working("backing up"):
        back_up(settings, file.absolute())
    out.print(f"backed up to {file}, {file.stat().st_size / 2**20:,.0f} MiB", soft_wrap=True, markup=False)


def clean(
    recipe: RecipeName = DEFAULT_RECIPE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would go, and remove nothing.")] = False,
) -> None:
    """Remove old drafts, finished work, caches, copies, logs and history beyond [keep]; never what may serve again.

    Example: redraft clean --dry-run
    """
    _, parsed = prepare(recipe)
    from tasks.clean_home import clean_home

    going = clean_home.fn(parsed.keep, parsed.refresh.pool, dry_run)
    for item, why in going:
        out.print(f"{item.kind:14} {item.name}, {item.num_bytes / 2**20:,.1f} MiB: {why}", soft_wrap=True, markup=False)
    total = sum(item.num_bytes for item, _ in going) / 2**20
    out.print(f"{len(going)} parts, {total:,.1f} MiB {'would go' if dry_run else 'went'}", markup=False)


def move_home() -> None:
    """Move log, versions and registry to where REDRAFT_QUERYLOG, REDRAFT_ARTIFACTS and REDRAFT_MLFLOW_URI say.

    Each row is compared afterwards. A move that was stopped goes on; until it is complete nothing else opens the log.

    Example: redraft move-home
    """
    settings = open_settings()
    from infra.move_home import move_home as move

    with working("moving the home") as tell:
        moved = move(settings, tell)
    for what, counted in (("rows", moved.rows), ("versions", moved.versions)):
        if counted:
            told = ", ".join(f"{name} {number:,}" for name, number in counted.items() if number)
            out.print(f"{what}: {told}", soft_wrap=True, markup=False)
    if moved.copies is not None:
        out.print(f"the home's own files of these: {moved.copies}", soft_wrap=True, markup=False)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `redraft backup` wrote.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for a refresh that is reading rows.")
    ] = 3600.0,
) -> None:
    """Restore a home from a backup, into a new folder or in place. A running service keeps serving.

    Keys stay as they are now, and what was erased since is erased again.

    Example: redraft restore redraft-monday.tar
    """
    settings = open_settings()
    from infra.backup import restore as bring_back

    with working("restoring"):
        contents, copies = bring_back(settings, file, wait_s)
    made = datetime.fromtimestamp(contents.made_ms / 1000, UTC).isoformat(" ", "seconds")
    out.print(f"{settings.home} is as it was at {made}", soft_wrap=True, markup=False)
    if copies is not None:
        out.print(f"its databases as they were until now: {copies}", soft_wrap=True, markup=False)


def erase(
    subject: Annotated[
        str | None,
        typer.Option(
            help="Whose rows: the hash in the log, or a name, as clients gave it as `user` or `safety_identifier`, "
            "or as rows were imported with it."
        ),
    ] = None,
    wait_s: WaitS = 3600.0,
) -> None:
    """Erase a person's rows and all that was made of them. Without a subject, complete erasures that were interrupted.

    Example: redraft erase --subject alice
    """
    if subject is not None and not subject.strip():  # a shell's variable that is not set, maybe
        raise ValueError(f'--subject is "{subject}", wanted a name or a hash, or none to complete what was interrupted')
    settings = open_settings()
    from infra.erase import erase_subject, finish_erasures

    finished = finish_erasures(settings, wait_s) if subject is None else [erase_subject(settings, subject, wait_s)]
    for certificate in finished:
        _show(settings, certificate)
    if not finished:
        out.print("no erasure was interrupted")


def retain(
    days: Annotated[float, typer.Option(min=0, help="Erase rows that were served more than this many days ago.")],
    wait_s: WaitS = 3600.0,
) -> None:
    """Erase rows by age, and all that was made of them. `retain_days` in a recipe's [schedule] does it every night.

    Example: redraft retain --days 30
    """
    settings = open_settings()
    from infra.erase import erase_older_than

    _show(settings, erase_older_than(settings, days, wait_s))


def _show(settings: "Settings", certificate: "Certificate") -> None:
    from infra.erase import certificate_file

    if not certificate.rows:
        out.print("found no such row: nothing was erased, and there is no certificate", soft_wrap=True)
        return
    done = (
        f"erased {certificate.rows} rows, {sum(certificate.regression_rows.values())} of them in regression sets; "
        f"{len(certificate.snapshots)} snapshots written again, {len(certificate.removed)} caches and work folders "
        f"removed, {len(certificate.redacted)} other files overwritten"
    )
    seen = [
        f"draft {number} saw {', '.join(f'{rows} as {role}' for role, rows in roles.items())}"
        for number, roles in certificate.drafts.items()
    ]
    if certificate.descendants:
        seen.append(f"trained on from these: {', '.join(map(str, certificate.descendants))}")
    for line in (done, *seen, f"certificate: {certificate_file(settings, certificate.number)}"):
        out.print(line, soft_wrap=True, markup=False)
