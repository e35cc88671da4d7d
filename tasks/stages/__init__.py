"""A task of Prefect's, what one shows while it runs, and directories that are made once.

Prefect takes seconds to import, so that waits until a flow calls a task. Outside a run (a task called through `.fn`)
only the log is written.

A directory is found again by what it was made from, and checked before it is used again. Prefect's own cache keys a
task by its lines: it would serve a stale result after an algorithm changed, and hand out references to files that are
gone. Here the key covers the code of every module that computes, of the methods that the params name, and the versions
of the libraries. A directory counts as made only while its manifest fits.
"""

import ast
import hashlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, cached_property, update_wrapper
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Generic, ParamSpec, Protocol, TypeVar, cast
from uuid import UUID

from pydantic import BaseModel
from tqdm import tqdm

from infra.artifacts import Artifact, canonical_json, file_sha256, publish, staged
from infra.files import lock_folder
from infra.settings import load_settings
from infra.trigger_store import duration
from models import catalog

P = ParamSpec("P")
R = TypeVar("R")
# Stage to key of what a plan found made; None where there is no plan, and steps are run.
PLANNED: ContextVar[dict[str, str] | None] = ContextVar("planned", default=None)
ROOT = Path(__file__).parents[2]
KEY_LENGTH = 16
# Say what a stage may be told, and compute nothing: what it was told is in its params.
SCHEMAS = ("models.recipe", "models.stages")
# Another version may compute something else.
LIBRARIES = ("torch", "transformers")


class task(Generic[P, R]):
    """A function that is a task where a flow calls it, and itself as `fn`."""

    def __init__(self, fn: Callable[P, R]) -> None:
        self.fn = fn
        update_wrapper(self, fn)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return (self._run if PLANNED.get() is None else self.fn)(*args, **kwargs)

    @cached_property
    def _run(self) -> Callable[P, R]:
        import prefect
        from prefect.cache_policies import NO_CACHE

        name = "{stage}" if "stage" in signature(self.fn).parameters else None  # of one task for several stages
        return prefect.task(cache_policy=NO_CACHE, task_run_name=name)(self.fn)


UPDATE_S = 2.0
LINE_S = 30.0  # where there is no terminal, a line now and then is all that shows life


class Show(Protocol):
    """Takes how much is done of how much, and a note."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def run_logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    """Return the run's logger."""
    if not _in_run():
        return logging.getLogger("redraft")
    from prefect.logging import get_run_logger

    return get_run_logger()


def flow_run_id() -> str:
    """Return the id of the flow run, empty outside one."""
    if not _in_run():
        return ""
    from prefect.runtime import flow_run

    return str(flow_run.id or "")


def name_run(name: str) -> None:
    """Name the flow run by what it does or did; outside one nothing happens."""
    if run_id := flow_run_id():
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(run_id), name=name)


@contextmanager
def progress(description: str) -> Iterator[Show]:
    """Yield a function that shows how far the task is, each note after what is being done.

    Where there is no terminal, a line estimates how long what is left of a total takes, by the speed since its first.
    """
    artifact_id = None
    if _in_run():
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        # Prefect's functions are typed for both worlds; called outside a loop they have done their work.
        artifact_id = cast("UUID", create_progress_artifact(0.0, description=description))
    shown_s, line_s, began = -UPDATE_S, time.monotonic(), (0.0, 0.0, 0.0)
    with tqdm(desc=description, total=0, unit_scale=True, disable=None, leave=False) as bar:

        def show(done: float, total: float, note: str = "") -> None:
            nonlocal shown_s, line_s, began
            bar.total = total
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)
            now_s = time.monotonic()
            if total != began[0]:
                began = total, done, now_s
            if artifact_id is not None and (now_s - shown_s >= UPDATE_S or done >= total):
                shown_s = now_s
                update_progress_artifact(artifact_id, 100 * done / max(total, 1), f"{description}: {note}")
            if bar.disable and now_s - line_s >= LINE_S:
                line_s = now_s
                said = f", {note}" if note else ""
                if more := done - began[1]:
                    said += f", {duration((now_s - began[2]) * (total - done) / more)} left"
                run_logger().info("%s: %d of %d%s", description, done, total, said)

        yield show


def table(key: str, rows: Sequence[Mapping[str, object]], description: str) -> None:
    """Log a table and show it in the UI, under a key of small letters, digits and dashes."""
    lines = ["  ".join(f"{name} {value}" for name, value in row.items()) for row in rows]
    run_logger().info("%s\n  %s", description, "\n  ".join(lines))
    if _in_run():
        from prefect.artifacts import create_table_artifact

        create_table_artifact([dict(row) for row in rows], key=key, description=description)


def _in_run() -> bool:
    if "prefect" not in sys.modules:
        return False
    from prefect.context import FlowRunContext, TaskRunContext

    return FlowRunContext.get() is not None or TaskRunContext.get() is not None


class NotMade(Exception):
    """A plan came to a step whose result is not there, and whatever follows would be made from it."""


@contextmanager
def planning(found: dict[str, str]) -> Iterator[None]:
    """Only look for the results of the block's steps, up to the first one that is not there; tell stages and keys."""
    token = PLANNED.set(found)
    try:
        with suppress(NotMade):
            yield
    finally:
        PLANNED.reset(token)


def cached_step(
    stage: str,
    kind: str,
    params: object,
    make: Callable[[Path, Path], None],
    inputs: Mapping[str, Artifact] | None = None,
    code: Sequence[object] = (),
) -> Artifact:
    """Return the directory of a stage, made now unless a good one is there.

    Args:
        stage: names the folder.
        kind: of the artifact.
        params: what the result depends on besides the inputs, as JSON.
        make: fills an empty directory, its first argument. The second one is a directory that lasts until the stage is
            complete, so that a killed run is resumed.
        inputs: role to what the result is made from.
        code: what computes it besides `make` and the methods that `params` name: functions and modules; the module that
            each function stands in counts as a whole.
    """
    key = stage_key(stage, params, inputs or {}, (make, *code))
    artifacts = load_settings().local_artifacts
    final, work = artifacts / stage / key, artifacts / "work" / key
    found, planned = _made(final, kind), PLANNED.get()
    if planned is not None:
        if found is None:
            raise NotMade(stage)
        planned.setdefault(stage, key)
    if found is not None:
        return found
    work.mkdir(parents=True, exist_ok=True)
    with lock_folder(work):
        if (found := _made(final, kind)) is None:  # another process may have made it while this one waited
            with staged(final) as directory:
                make(directory, work)
            run_logger().info("%s: made, %s", stage, key)
        with suppress(FileNotFoundError):  # of those that waited the first removed it
            shutil.rmtree(work)  # it may hold hidden states, which are large and count as text
    return found or publish(final, kind)


def _made(final: Path, kind: str) -> Artifact | None:
    if not final.exists():
        return None
    try:
        artifact = publish(final, kind)
    except ValueError as error:
        run_logger().warning("%s: made again, because %s", final.parent.name, error)
        return None
    run_logger().info("%s: cached, %s", final.parent.name, final.name)
    return artifact


def stage_key(stage: str, params: object, inputs: Mapping[str, Artifact], code: Sequence[object]) -> str:
    """Return the first 16 hexadecimal digits of the hash of all that a stage's result depends on."""
    modules = (one.__name__ if isinstance(one, ModuleType) else one.__module__ for one in code)
    parts = {
        "stage": stage,
        "params": params,
        "inputs": {role: artifact.sha256 for role, artifact in inputs.items()},
        "code": code_version(*modules, *methods_in(params)),
        "libraries": {name: version(name) for name in LIBRARIES},
    }
    return json_sha256(parts)[:KEY_LENGTH]


def json_sha256(value: object) -> str:
    """Return the sha256 of a value's canonical JSON as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def local_content(path: str) -> dict[str, str]:
    """Return the sha256 of a file, or of all files below a folder, as an entry of a stage's params.

    What does not lie on this machine, such as a hub's id, has no entry.
    """
    root = Path(path)
    if not path or not root.exists():
        return {}
    files = [root] if root.is_file() else [file for file in root.rglob("*") if file.is_file()]
    return {
        "sha256": json_sha256({file.relative_to(root).as_posix(): file_sha256(file, remembered=True) for file in files})
    }


def content_of(table: BaseModel) -> dict[str, object]:
    """Return what a domain's table says, the content of its source's files on this machine included."""
    return {**table.model_dump(mode="json"), **local_content(getattr(getattr(table, "source", None), "path", ""))}


def code_version(*modules: str, rooms: Sequence[str] = ("models",)) -> str:
    """Hash the syntax of modules and of what they import of some packages, near and far.

    Comments, layout and the recipe's schema don't count. What is only looked up by name (`models.catalog`) is not seen
    here; `stage_key` adds the methods that a stage's params name. ValueError if there is no such module.
    """
    return json_sha256(code_hashes(*modules, rooms=rooms))


def code_hashes(*modules: str, rooms: Sequence[str] = ("models",)) -> dict[str, str]:
    """Return what `code_version` hashes: each module's own hash."""
    waiting, hashes, packages = list(modules), dict[str, str](), tuple(f"{room}." for room in rooms)
    for name in modules:
        if _source(name) is None:
            raise ValueError(f'no module "{name}" under {ROOT}')
    while waiting:
        name = waiting.pop()
        if name not in hashes and (source := _source(name)) is not None:
            hashes[name], imports = _hash_and_imports(source.read_bytes())
            waiting += [one for one in imports if one.startswith(packages) and one not in SCHEMAS]
    return hashes


def methods_in(params: object) -> list[str]:
    """Return the modules of the methods that tables in a stage's params name, of whichever family has such a one."""
    waiting, named = [params], set[str]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            named |= {value["name"]} if isinstance(value.get("name"), str) else set()
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    families = {family: catalog.names(family) for family in catalog.families()} if named else {}
    return [f"models.{family}.{name}" for family, names in families.items() for name in sorted(named & {*names})]


def _source(module: str) -> Path | None:
    """Return a module's file: under the root, or in another folder that its package was given."""
    package, _, name = module.rpartition(".")
    folders = [ROOT.joinpath(*package.split(".")), *map(Path, getattr(sys.modules.get(package), "__path__", ()))]
    files = (file for folder in folders for file in (folder / f"{name}.py", folder / name / "__init__.py"))
    return next((file for file in files if file.is_file()), None)


@cache
def _hash_and_imports(source: bytes) -> tuple[str, list[str]]:
    """Return the hash of a module's syntax, and the names that it imports; stages have most modules in common."""
    tree, imports = ast.parse(source), list[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports
