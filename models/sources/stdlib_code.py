"""Requests for Python functions, mined from the docstrings of the running interpreter's own standard library.

The prompts differ from one Python version to the next, so record the version beside any figure made with them. Sources
are parsed and never imported. The group is the top-level module: functions of one package are too alike to split.
"""

import ast
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent
from typing import Literal

from pydantic import Field

from models.params import BaseParams
from models.sources import Message, Prompt, unique

# Tests and their data, code that is no library's, and tables in the form of modules.
_SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "turtledemo",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Params(BaseParams):
    """Which functions become prompts."""

    name: Literal["stdlib_code"] = "stdlib_code"
    min_chars: int = Field(20, ge=1, description="in the docstring")
    max_chars: int = Field(600, ge=1, description="where the docstring is cut")


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt for each function of a module or class that has a docstring, in the order of files and lines.

    Raises:
        ValueError: the interpreter comes without the sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_files(root))
    if not files:
        raise ValueError(f"the source stdlib_code found no Python files under {root}")
    return unique(prompt for path in files for prompt in _mine(root, path, params))


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _mine(root: Path, path: Path, params: Params) -> Iterator[Prompt]:
    module = path.relative_to(root).parts[0].removesuffix(".py")
    for node in _functions(ast.parse(path.read_bytes())):
        docstring = ast.get_docstring(node) or ""
        if len(docstring) >= params.min_chars:
            message = Message(role="user", content=_request(node, docstring[: params.max_chars].rstrip()))
            yield Prompt(messages=(message,), domain="code", group=f"stdlib:{module}")


def _functions(scope: ast.Module | ast.ClassDef) -> Iterator[_Function]:
    for node in scope.body:
        if isinstance(node, _Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node)


def _request(node: _Function, docstring: str) -> str:
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    docstring = docstring.replace('"""', "'''")  # else it would end early
    body = indent(f'"""{docstring}"""', "    ")
    function = f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:\n{body}"
    return f"Write the Python function below.\n```python\n{function}\n```"
