"""Directories that are made once: found again by what they were made from, and checked before they are used again.

Prefect's own cache keys a task by its lines: it would serve a stale result after an algorithm changed, and hand out
references to files that are gone. Here the key covers the code of every module that computes, of the methods that the
params name, and the versions of the libraries. A directory counts as made only while its manifest fits.
"""

import ast
import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel

from infra.artifacts import Artifact, canonical_json, file_sha256, publish, staged
from infra.files import lock_folder
from infra.settings import load_settings
from models import catalog
from tasks.stages.task import PLANNED, run_logger

ROOT = Path(__file__).parents[2]
KEY_LENGTH = 16
# Say what a stage may be told, and compute nothing: what it was told is in its params.
SCHEMAS = ("models.recipe", "models.stages")
# Another version may compute something else.
LIBRARIES = ("torch", "transformers")


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
