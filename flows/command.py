"""How a function becomes a command: wrong input is one line and exit code 2, a failure is 1, Ctrl-C is 130.

Tracebacks, those of a flow above all, go to a log that the line names. And what commands begin with: settings, a
recipe, and where to write.
"""

import hashlib
import inspect
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape

from infra.files import write_atomic
from infra.home import open_home
from infra.settings import Settings, load_settings
from infra.views.results import out
from models.recipe import Recipe, changed_tables, load_recipe, toml

FAILED, USAGE, INTERRUPTED = 1, 2, 130
LOG = "commands.log"
WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)

log = logging.getLogger(__name__)

NONE: list[str] = []
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Folder for cells and report; by default in the home folder.")
]
Changes = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe, such as distill.num_epochs=3; repeatable."),
]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="Name of a recipe that ships, or path of a TOML file.")]


def command_of(
    app: typer.Typer, panel: str | None = None, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds a function to `app`, with our exit codes; `panel` is the heading of its help."""

    def command(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def wrapped(**options: Any) -> None:
            try:
                if changes := options.pop("changes", ()):
                    options["recipe"] = _changed(options["recipe"], changes)
                function(**options)
            except (ValueError, ConnectionError, *WRONG_PATH) as error:  # a registry out of reach is a ConnectionError
                _fail(error, USAGE)
            except (RuntimeError, TimeoutError, FloatingPointError) as error:
                _fail(error, FAILED)
            except sqlite3.Error as error:  # torn, locked or full
                _fail(error, FAILED, f"a database of the home can't be used: {error}")
            except KeyboardInterrupt as error:
                _fail(error, INTERRUPTED, "interrupted")
            except Exception as error:  # a fault of ours, or of a library
                if not hasattr(error, "__notes__"):
                    with suppress(Exception), logged(load_settings()):
                        raise
                _fail(error, FAILED, f"{type(error).__name__}: {error}")

        if "recipe" in (taken := inspect.signature(function)).parameters:
            changes = inspect.Parameter("changes", inspect.Parameter.KEYWORD_ONLY, default=NONE, annotation=Changes)
            wrapped.__dict__["__signature__"] = taken.replace(parameters=[*taken.parameters.values(), changes])
            wrapped.__annotations__ = {**function.__annotations__, "changes": Changes}
        return app.command(name, help=escape(inspect.getdoc(function) or ""), rich_help_panel=panel)(wrapped)

    return command


def _changed(recipe: str, changes: list[str]) -> str:
    """Write a recipe with changes into the home, for this command and what it starts, and return the file's path."""
    settings, tables = load_settings(), changed_tables(recipe, changes)
    open_home(settings)
    text = toml(tables)
    file = settings.home / "recipes" / f"{tables['name']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.toml"
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, text)
    return str(file)


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
    from infra.supervisor import read_state

    open_home(settings)

    if "PREFECT_API_URL" not in os.environ:  # the server of `redraft up`, or one that Prefect starts for this command
        login = pages_login(settings.home)
        os.environ |= {"PREFECT_API_AUTH_STRING": login, "PREFECT_SERVER_API_AUTH_STRING": login}
        if (state := read_state(settings.home)) is not None and (prefect := state.url("prefect")):
            os.environ["PREFECT_API_URL"] = f"{prefect}/api"  # flows show up in the server that runs
    return settings


@contextmanager
def logged(settings: Settings) -> Iterator[None]:
    """Write what the block says to a log, which an error that it raises names; the terminal gets no tracebacks.

    Prefect, whose errors say again what the block raises, sets the terminal's handler when imported: do so before.
    """
    file, root = settings.home / "logs" / LOG, logging.getLogger()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.touch(0o600)
    handler, shown = logging.FileHandler(file, encoding="utf-8"), [*root.handlers]
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s - %(message)s"))
    root.addHandler(handler)
    for one in shown:
        one.addFilter(_is_shown)
    try:
        yield
    except Exception as error:
        log.exception("the command failed")  # its arguments may name a person
        error.add_note(f"log: {file}")
        raise
    finally:
        root.removeHandler(handler)
        handler.close()
        for one in shown:
            one.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not record.exc_info and (record.levelno < logging.ERROR or not record.name.startswith("prefect"))


def complete_erasures(settings: Settings) -> None:
    """Complete erasures that were killed; one that has to wait for a refresh is completed by the next start."""
    from infra.erase import finish_erasures

    try:
        for certificate in finish_erasures(settings):
            out.print(f"erasure {certificate.number} is complete", markup=False)
    except (TimeoutError, ConnectionError) as error:
        out.print(f"an erasure is not complete: {error}", soft_wrap=True, markup=False)


def _fail(error: BaseException, code: int, said: str = "") -> NoReturn:
    typer.echo("; ".join([f"redraft: {said or error}", *getattr(error, "__notes__", ())]), err=True)
    raise typer.Exit(code)
