"""What the installed vLLM knows, read off its sources: an import takes seconds, a misspelt recipe must fail at once."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def engine_arguments() -> frozenset[str] | None:
    """Return the names of the engine's arguments; None if vLLM is not installed, so that nothing can be said."""
    if (tree := _parsed("engine/arg_utils.py")) is None:
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    fields = (line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))


@cache
def tool_parsers() -> frozenset[str] | None:
    """Return the names of the parsers of tool calls; None if vLLM is not installed here."""
    if (tree := _parsed("tool_parsers/__init__.py")) is None:
        return None
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    keys = (key for table in tables for key in table.keys)
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _parsed(file: str) -> ast.Module | None:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return ast.parse(Path(spec.submodule_search_locations[0], file).read_bytes())
