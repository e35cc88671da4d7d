"""The commands that erase what was logged; `flows.cli` adds them."""

from typing import TYPE_CHECKING, Annotated

import typer

from flows.command import open_settings, out

if TYPE_CHECKING:
    from infra.erasures import Certificate
    from infra.settings import Settings

WaitS = Annotated[
    float, typer.Option("--wait", min=0, help="Seconds to wait for a refresh that is reading rows; then run it again.")
]


def erase(
    subject: Annotated[
        str,
        typer.Option(
            help="Whose rows: the hash in the log, or a name, as clients gave it as `user` or `safety_identifier`, "
            "or as rows were imported with it."
        ),
    ] = "",
    wait_s: WaitS = 3600.0,
) -> None:
    """Erase a person's rows and all that was made of them. Without a subject, complete erasures that were interrupted.

    Example: redraft erase --subject alice
    """
    settings = open_settings()
    from infra.erase import erase_subject, finish_erasures

    if subject:
        _show(settings, erase_subject(settings, subject, wait_s))
        return
    finished = finish_erasures(settings, wait_s)
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
    lines = [done]
    for number, roles in certificate.drafts.items():
        lines.append(f"draft {number} saw {', '.join(f'{rows} as {role}' for role, rows in roles.items())}")
    if certificate.descendants:
        lines.append(f"trained on from these: {', '.join(map(str, certificate.descendants))}")
    lines.append(f"certificate: {certificate_file(settings, certificate.number)}")
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)
