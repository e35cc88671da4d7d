"""How a function becomes a command: wrong input is one line and exit code 2, a failure is 1, Ctrl-C is 130.

And what commands begin with: settings, a recipe, and where to write.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from infra.settings import Settings, load_settings

if TYPE_CHECKING:
    from tasks.recipe import Recipe

DEFAULT_RECIPE = "smollm2-cpu"
FAILED, USAGE, INTERRUPTED = 1, 2, 130

out = Console()

RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="A recipe that ships, or the path of a TOML file.")]


def command_of(app: typer.Typer) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds a function to `app` with the exit codes of this program."""

    def command(function: Callable[..., None]) -> Callable[..., None]:
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

    return command


def prepare(recipe: str) -> "tuple[Settings, Recipe]":
    """Return the settings, already in the environment, and a recipe.

    Raises:
        ValueError: a setting or the recipe is wrong.
    """
    settings = open_settings()
    from flows.recipe import load_recipe

    return settings, load_recipe(recipe)


def open_settings() -> Settings:
    """Read the settings and put them into the environment, before anything that reads it is imported."""
    settings = load_settings()
    settings.prepare_environment()
    settings.home.mkdir(parents=True, exist_ok=True)  # Prefect makes its folder, but not the one above
    from infra.supervisor import read_state

    if (state := read_state(settings.home)) is not None and (prefect := state.url("prefect")):
        os.environ.setdefault("PREFECT_API_URL", f"{prefect}/api")  # flows show up in the server that runs
    return settings


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"redraft: {message}", err=True)
    raise typer.Exit(code)
