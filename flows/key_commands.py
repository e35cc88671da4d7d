"""Commands `redraft keys …`: who may ask the service. A running one sees each change at the next request."""

import time
from typing import Annotated, Any, cast

import typer
from rich.table import Table

from flows.command import command_of, open_settings
from infra.views.results import out

KEYS = "Keys"

keys = typer.Typer(name="keys", help="Make, revoke and list the keys that the service accepts.", no_args_is_help=True)
command = command_of(keys, KEYS)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What the key is called, such as a team.")]


@command
def add(
    name: Name,
    role: Annotated[
        str, typer.Option(help="client reaches /v1, scraper /metrics, operator all of the service.")
    ] = "client",
    log: Annotated[
        str, typer.Option(help="What its requests may leave in the query log at most: none, metadata or full.")
    ] = "",
) -> None:
    """Make a key and print it once; only its hash is kept. As soon as a client has a key, /v1 refuses requests without.

    Example: redraft keys add team-one --log metadata
    """
    from infra.consent import CONSENT_LEVELS
    from infra.keys import ROLES, add_key, keys_path

    for said, known, what in ((role, ROLES, "--role"), (log or "none", CONSENT_LEVELS, "--log")):
        if said not in known:
            raise ValueError(f"{what} is {said!r}, wanted one of {', '.join(known)}")
    settings = open_settings()
    typer.echo(add_key(keys_path(settings), name, cast("Any", role), cast("Any", log) or None))


@command
def revoke(name: Name) -> None:
    """Revoke a key. The key "home", which redraft's own commands use, is replaced at the next command.

    Example: redraft keys revoke team-one
    """
    settings = open_settings()
    from infra.keys import keys_path, revoke_key

    revoke_key(keys_path(settings), name)
    out.print(f"revoked: {name}", markup=False)


@command_of(keys, KEYS, "list")
def show() -> None:
    """List the keys by name, with role and logging policy.

    Example: redraft keys list
    """
    settings = open_settings()
    from infra.keys import keys_path, read_keys

    table = Table("key", "role", "log", "made", "revoked")
    for key in read_keys(keys_path(settings)):
        table.add_row(key.name, key.role, key.log or "", _day(key.made_ms), _day(key.revoked_ms))
    out.print(table)


@command
def pages() -> None:
    """Print the login of Prefect's and MLflow's pages under `redraft up`, as user:password.

    Example: redraft keys pages
    """
    settings = open_settings()
    from infra.auth_middleware import pages_login

    typer.echo(pages_login(settings.home))


def _day(ms: int | None) -> str:
    return "" if ms is None else time.strftime("%Y-%m-%d", time.localtime(ms / 1000))
