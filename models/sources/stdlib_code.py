"""Requests for Python functions, and the functions, mined from the running interpreter's own standard library.

Both differ from one Python version to the next, so record the version beside any figure made with them. Sources
are parsed and never imported. The group is the top-level module: functions of one package are too alike to split.
"""

import ast
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from io import BytesIO, StringIO
from pathlib import Path
from textwrap import dedent, indent
from typing import Literal, NamedTuple

from pydantic import Field

from models.params import BaseParams
from models.sources import Document, Message, Prompt, unique

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
    """Which functions become prompts and documents."""

    name: Literal["stdlib_code"] = "stdlib_code"
    min_chars: int = Field(20, ge=1, description="in the docstring")
    max_chars: int = Field(600, ge=1, description="where a prompt's docstring is cut")
    max_document_chars: int = Field(4000, ge=1, description="in a function; longer ones are no documents")


def prompts(params: Params) -> list[Prompt]:
    """Return one prompt for each function of a module or class that has a docstring, in the order of files and lines;
    ValueError if the interpreter comes without the sources of its library."""
    return unique(map(_prompt, _mine_all(params)))


def documents(params: Params) -> list[Document]:
    """Return the source of each function that has a docstring, in the order of files and lines; ValueError if the
    interpreter comes without the sources of its library."""
    mined = (one for one in _mine_all(params) if len(one.source) <= params.max_document_chars)
    return unique(Document(content=one.source, domain="code", group=one.group) for one in mined)


class _Mined(NamedTuple):
    group: str
    node: _Function
    docstring: str
    source: str


def _mine_all(params: Params) -> Iterator[_Mined]:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(_files(root))
    if not files:
        raise ValueError(f"the source stdlib_code found no Python files under {root}")
    return (mined for path in files for mined in _mine(root, path, params))


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def _mine(root: Path, path: Path, params: Params) -> Iterator[_Mined]:
    group, content = f"stdlib:{path.relative_to(root).parts[0].removesuffix('.py')}", path.read_bytes()
    encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
    lines = list(StringIO(content.decode(encoding), newline=None))  # a form feed ends no line, as in the parser
    for node in _functions(ast.parse(content)):
        docstring = ast.get_docstring(node) or ""
        if len(docstring) >= params.min_chars:
            source = dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
            yield _Mined(group, node, docstring[: params.max_chars].rstrip(), source)


def _prompt(mined: _Mined) -> Prompt:
    message = Message(role="user", content=_request(mined.node, mined.docstring))
    return Prompt(messages=(message,), domain="code", group=mined.group)


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
