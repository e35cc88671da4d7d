"""How a function becomes a command: wrong input is one line and exit code 2, a failure is 1, Ctrl-C is 130."""

from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer

DEFAULT_RECIPE = "smollm2-cpu"
FAILED, USAGE, INTERRUPTED = 1, 2, 130

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


def _fail(message: object, code: int) -> NoReturn:
    typer.echo(f"redraft: {message}", err=True)
    raise typer.Exit(code)
