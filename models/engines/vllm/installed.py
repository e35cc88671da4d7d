"""What the installed vLLM offers, read off its source: importing it takes seconds.

Each function returns None where vLLM is not installed.
"""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Where vLLM's classes of models are, and the interface of those that hand out states of their layers.
MODELS, EAGLE3 = "model_executor/models", "SupportsEagle3"


@cache
def engine_arguments() -> frozenset[str] | None:
    """Return the names of vLLM's engine arguments."""
    if (tree := _parsed("engine/arg_utils.py")) is None:
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    fields = (line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))


@cache
def tool_parsers() -> frozenset[str] | None:
    """Return the names of the parsers of tool calls."""
    if (tree := _parsed("tool_parsers/__init__.py")) is None:
        return None
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    keys = (key for table in tables for key in table.keys)
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@cache
def hands_out_states(architecture: str) -> bool | None:
    """Return whether vLLM's class of a target has the interface of EAGLE-3.

    What vLLM has no class for runs as transformers' own, in a class that has it.
    """
    if (tree := _parsed(f"{MODELS}/registry.py")) is None:
        return None
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    places = {
        key.value: [str(part.value) for part in place.elts if isinstance(part, ast.Constant)]
        for table in tables
        for key, place in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(place, ast.Tuple)
    }
    if architecture not in places:
        return True
    module, name = places[architecture]
    return _derives(module.removeprefix("vllm.") if "." in module else f"{MODELS.replace('/', '.')}.{module}", name)


def _derives(module: str, name: str) -> bool:
    """Return whether a class of a module of vLLM, there or where it is imported from, has the interface `EAGLE3`."""
    package, tree = module.split("."), _parsed(f"{module.replace('.', '/')}/__init__.py")
    if tree is None:
        package, tree = package[:-1], _parsed(f"{module.replace('.', '/')}.py")
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return EAGLE3 in bases or any(_derives(module, base) for base in bases)
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        place = node.module.removeprefix("vllm.")
        if node.level:
            place = ".".join([*package[: len(package) + 1 - node.level], place])
        if any((one.asname or one.name) == name and _derives(place, one.name) for one in node.names):
            return True
    return False


def _parsed(file: str) -> ast.Module | None:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], file)
    return ast.parse(path.read_bytes()) if path.is_file() else None
