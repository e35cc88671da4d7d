"""How a function becomes a command: wrong input is one line and exit code 2, a failure is 1, Ctrl-C is 130.

And what commands begin with: settings, a recipe, and where to write.
"""

import inspect
import os
import sqlite3
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from infra.settings import Settings, load_settings
from models.recipe import Recipe, load_recipe

FAILED, USAGE, INTERRUPTED = 1, 2, 130

out = Console()

NONE: list[str] = []
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for cells and report; by default in the home folder.")
]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Name of a recipe that ships, or path of a TOML file.")]


def command_of(
    app: typer.Typer, panel: str | None = None, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds a function to `app`, with our exit codes; `panel` is the heading of its help."""

    def command(function: Callable[..., None]) -> Callable[..., None]:
        @app.command(name, help=escape(inspect.getdoc(function) or ""), rich_help_panel=panel)
        @wraps(function)
        def wrapped(**options: Any) -> None:
            try:
                function(**options)
            except (ValueError, ConnectionError) as error:  # a registry out of reach is a ConnectionError
                _fail(error, USAGE)
            except (RuntimeError, TimeoutError, FloatingPointError) as error:
                _fail(error, FAILED)
            except sqlite3.Error as error:  # torn, locked or full
                _fail(f"a database of the home can't be used: {error}", FAILED)
            except KeyboardInterrupt:
                _fail("interrupted", INTERRUPTED)

        return wrapped

    return command


def prepare(recipe: str) -> tuple[Settings, Recipe]:
    """Return the settings, already in the environment, and a recipe; ValueError if a setting or the recipe is wrong."""
    return open_settings(), load_recipe(recipe)


def open_settings() -> Settings:
    """Read the settings, put them into the environment before anything that reads it is imported, and open the home.

    ValueError if a setting is wrong, or the home is of another format.
    """
    settings = load_settings()
    settings.prepare_environment()
    from infra.auth_middleware import pages_login
    from infra.home import open_home
    from infra.supervisor import read_state

    open_home(settings)

    if "PREFECT_API_URL" not in os.environ:  # the server of `redraft up`, or one that Prefect starts for this command
        login = pages_login(settings.home)
        os.environ |= {"PREFECT_API_AUTH_STRING": login, "PREFECT_SERVER_API_AUTH_STRING": login}
        if (state := read_state(settings.home)) is not None and (prefect := state.url("prefect")):
            os.environ["PREFECT_API_URL"] = f"{prefect}/api"  # flows show up in the server that runs
    return settings


def complete_erasures(settings: Settings) -> None:
    """Complete erasures that were killed; one that has to wait for a refresh is completed by the next start."""
    from infra.erase import finish_erasures

    try:
        for certificate in finish_erasures(settings):
            out.print(f"erasure {certificate.number} is complete", markup=False)
    except (TimeoutError, ConnectionError) as error:
        out.print(f"an erasure is not complete: {error}", soft_wrap=True, markup=False)


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"redraft: {message}", err=True)
    raise typer.Exit(code)
