"""How a function becomes a command: wrong input is one line and exit code 2, a failure is 1, Ctrl-C is 130.

And what commands begin with: settings, a recipe, and where to write.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from infra.settings import Settings, load_settings
from models.recipe import Recipe, load_recipe

FAILED, USAGE, INTERRUPTED = 1, 2, 130

out = Console()

RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Name of a recipe that ships, or path of a TOML file.")]


def command_of(app: typer.Typer, panel: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds a function to `app`, under heading `panel` of its help, with our exit codes."""

    def command(function: Callable[..., None]) -> Callable[..., None]:
        @app.command(rich_help_panel=panel)
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

    return command


def prepare(recipe: str) -> tuple[Settings, Recipe]:
    """Return the settings, already in the environment, and a recipe.

    Raises:
        ValueError: a setting or the recipe is wrong.
    """
    settings = open_settings()
    return settings, load_recipe(recipe)


def open_settings() -> Settings:
    """Read the settings, put them into the environment before anything that reads it is imported, and open the home.

    Raises:
        ValueError: a setting is wrong, or the home is of a newer format.
    """
    settings = load_settings()
    settings.prepare_environment()
    from infra.home import open_home
    from infra.supervisor import read_state

    open_home(settings)

    if (state := read_state(settings.home)) is not None and (prefect := state.url("prefect")):
        os.environ.setdefault("PREFECT_API_URL", f"{prefect}/api")  # flows show up in the server that runs
    return settings


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"redraft: {message}", err=True)
    raise typer.Exit(code)
