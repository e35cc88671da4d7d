"""The references in docs/reference, written from the code: recipe keys, command line, HTTP API, metrics.

    python -m tests.references

writes them all; `test_references.py` fails where one is out of date, and where a key says nothing of itself. It lies
here because only tests may import every folder.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import GenericAlias, ModuleType, NoneType
from typing import Any, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python
from typer.main import get_command
from typer.models import ArgumentInfo

from flows import cli
from infra.status import ServiceStatus
from models import catalog
from models.catalog import Method
from models.core.learning import distill
from models.params import BaseParams, TrainingParams
from models.recipe import Recipe
from services import access, app, metrics, recorder
from tests.infra.statuses import STATUS

ROOT = Path(__file__).parents[1]
WRITTEN = "Written by `make references`; edit the code that it describes instead."
RECIPES = (
    "A recipe is a TOML file: `redraft build --recipe mine.toml`. A key that is unknown, missing or out of range is an "
    "error that names it. Tables come first, then the methods that a key `name` chooses from."
)
CODES = (
    "Wrong input, such as an unknown recipe or a port in use, ends with one line and exit code 2, a failure with 1, "
    "Ctrl-C with 130. Settings are environment variables: see [operations](../operations.md#settings)."
)
ERRORS = (
    "In OpenAI's shape: `error` with `message`, `type`, `param` and `code`; on `/v1/messages` in Anthropic's. `…` is "
    "what was sent or wanted."
)
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
# Tables whose class the recipe does not name, because it imports torch.
LAZY: dict[str, type[BaseModel]] = {"distill": distill.Params}
WORDS = {str: "text", int: "integer", float: "number", bool: "flag", Path: "path"}


def recipe_reference() -> str:
    """Return every key of a recipe, those of each method included."""
    plain = [name for name in Recipe.model_fields if not _is_table(Recipe, name)]
    blocks = ["# Recipe keys", f"{WRITTEN} {RECIPES}", _keys(Recipe, plain)]
    for name, field in Recipe.model_fields.items():
        if name not in plain:
            blocks += _table(name, Recipe, field)
    blocks += ["## The training loop", "In every table of a stage that trains."]
    blocks.append(_keys(TrainingParams, list(TrainingParams.model_fields)))
    for family in families():
        blocks += _family(family)
    return _page(*blocks)


def cli_reference() -> str:
    """Return every command of `redraft` as its help says it."""
    blocks, panel = ["# Commands", f"{WRITTEN} {CODES}"], ""
    for path, command in commands():
        heading, named = command.rich_help_panel or cli.MEASURE, f"redraft {' '.join(path)}"
        if heading != panel:
            blocks, panel = [*blocks, f"## {heading}"], heading
        said, _, example = (inspect.getdoc(command.callback) or "").partition("Example: ")
        usage = " ".join(command.collect_usage_pieces(command.context_class(command, info_name=named)))
        blocks += [f"### {named}", said.strip(), f"```\n{named} {usage}\n{example.strip()}   # example\n```"]
        if rows := _options(command):
            blocks.append(_grid(("option", "type", "default", "meaning"), rows))
    return _page(*blocks)


def api_reference() -> str:
    """Return the service's routes, headers and errors."""
    routes = [route for route in app.routes(None).routes if isinstance(route, APIRoute)]
    told = [
        (f"`{' '.join(sorted(route.methods))} {route.path}`", inspect.cleandoc(route.endpoint.__doc__ or ""))
        for route in routes
    ]
    return _page(
        "# HTTP API",
        f"{WRITTEN} How to call it with the `openai` client is in [operations](../operations.md#call-the-service).",
        _grid(("route", "answers"), told),
        "## Status",
        "Of one replica, since its start.",
        _grid(("field", "type", "meaning"), list(_fields(ServiceStatus))),
        "## What an answer says of speculation",
        "In `usage.redraft`; of a stream, in the event with the usage (of chats, with `stream_options.include_usage`).",
        _grid(("field", "type", "meaning"), list(_fields(recorder.Speculated))),
        "## Request headers",
        "No other header of a request reaches the service.",
        _grid(("header", "meaning"), [(f"`{name}`", said) for name, said in access.REQUEST_HEADERS.items()]),
        "## Response headers",
        _grid(("header", "meaning"), [(f"`{name}`", said) for name, said in access.RESPONSE_HEADERS.items()]),
        "## Errors",
        f"{ERRORS} What vLLM itself refuses is a 400 or 404 with its message.",
        _grid(("status", "code", "message"), sorted(set(request_errors()))),
    )


def metrics_reference() -> str:
    """Return the metrics of /metrics that are the service's own."""
    rows = []
    for metric in metrics.StatusCollector(STATUS).collect():
        sample = metric.samples[0]
        labels = ", ".join(f"`{label}`" for label in sample.labels)
        rows.append((f"`{sample.name}`", metric.type, labels or "–", metric.documentation))
    return _page(
        "# Metrics",
        f"{WRITTEN} `GET /metrics` answers in Prometheus' text format; vLLM's own metrics (`vllm:…`) follow these.",
        _grid(("metric", "type", "labels", "meaning"), rows),
    )


REFERENCES: dict[str, Callable[[], str]] = {
    "docs/reference/recipe.md": recipe_reference,
    "docs/reference/cli.md": cli_reference,
    "docs/reference/api.md": api_reference,
    "docs/reference/metrics.md": metrics_reference,
}


def families() -> list[str]:
    """Return the folders of models/ whose files are methods of a recipe."""
    return [name for name in catalog.families() if any(hasattr(method, "Params") for method in _methods(name))]


def commands() -> Iterator[tuple[list[str], Any]]:
    """Yield each command with the words that name it, in the order of `redraft --help`."""

    def inside(group: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from inside(command, [*path, name])
            else:
                yield [*path, name], command

    yield from inside(get_command(cli.app), [])


def undocumented() -> list[str]:
    """Return the recipe keys that say nothing of themselves, as table.key."""
    models = [Recipe, *_nested(Recipe), *LAZY.values()]
    models += [method.Params for family in families() for method in _methods(family) if hasattr(method, "Params")]
    return sorted(
        {
            f"{model.__module__}.{model.__name__}.{name}"
            for model in models
            for name, field in model.model_fields.items()
            if not _meaning(model, name, field) and not (name == "name" and issubclass(model, BaseParams))
            if not _is_table(model, name)
        }
    )


def attribute_docs(model: type) -> dict[str, str]:
    """Return attribute to what the `Attributes:` blocks of a class and its bases say of it."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        _, _, block = inspect.cleandoc(base.__dict__.get("__doc__") or "").partition("\nAttributes:\n")
        for entry in re.split(r"\n    (?=\S)", f"\n{block}".partition("\n\n")[0])[1:]:
            names, _, said = entry.partition(": ")
            found |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return found


def _methods(family: str) -> list[ModuleType]:
    return [catalog.load(family, name) for name in catalog.names(family)]


def _nested(model: type[BaseModel]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    for field in model.model_fields.values():
        inner = _model_in(field.annotation)
        if inner is not None:
            found += [inner, *_nested(inner)]
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the table that a field holds, by whatever it is wrapped in; None for a value, and for a method's."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None if annotation is BaseParams else annotation
    return next((inner for part in get_args(annotation) if (inner := _model_in(part)) is not None), None)


def _schema(model: type[BaseModel], name: str) -> dict[str, Any]:
    return dict(model.model_json_schema()["properties"][name])


def _family_in(*stated: Any) -> str | None:
    """Return the family that a field's annotation or metadata names, by whatever it is wrapped in."""
    for part in stated:
        if isinstance(part, Method):
            return part.family
        if (found := _family_in(*get_args(part))) is not None:
            return found
    return None


def _family_of(field: FieldInfo) -> str | None:
    return _family_in(field.annotation, *field.metadata)


def _is_table(model: type[BaseModel], name: str) -> bool:
    """Whether a key of `model` has a section of its own."""
    if model is Recipe and (name in LAZY or _family_of(model.model_fields[name])):
        return True
    return _model_in(model.model_fields[name].annotation) is not None


def _table(path: str, owner: type[BaseModel], field: FieldInfo) -> list[str]:
    family = _family_of(field) if owner is Recipe else None
    if family is not None:
        said = f"One of the [{family}](#methods-{family}), by its `name`, with that method's keys. Required."
        return [f"## [{path}]", said]
    model = LAZY.get(path) or _model_in(field.annotation)
    assert model is not None
    path += ".DOMAIN" if str(field.annotation).startswith("dict") else ""
    heading = f"[[{path}]]" if str(field.annotation).startswith("tuple") else f"[{path}]"
    said = inspect.cleandoc(model.__doc__ or "").partition("\nAttributes:\n")[0].split("\n\n")[0].replace("\n", " ")
    needed = "" if not field.is_required() else " Required."
    optional = " Optional: without it the stage is off." if field.default is None and not needed else ""
    tables = [key for key in model.model_fields if _is_table(model, key)]
    shared = [] if not issubclass(model, TrainingParams) else list(TrainingParams.model_fields)
    own = [key for key in model.model_fields if key not in {*tables, *shared, "name"}]
    blocks = [f"## {heading}", f"{said.strip()}{needed}{optional}", _keys(model, own)]
    if shared:
        blocks.append("And the keys of [the training loop](#the-training-loop).")
    for key in tables:
        blocks += _table(f"{path}.{key}", model, model.model_fields[key])
    return blocks


def _family(family: str) -> list[str]:
    package = import_module(f"models.{family}")
    blocks = [f"## Methods: {family}", _summary(package)]  # a table of a recipe may have the family's name
    for module in _methods(family):
        name = module.__name__.rpartition(".")[2]
        keys = [key for key in module.Params.model_fields if key != "name"]
        paper = f" ({module.PAPER})" if getattr(module, "PAPER", "") else ""
        blocks += [f"### {family}: {name}", f"{_summary(module)}{paper}"]
        blocks.append(_keys(module.Params, keys) if keys else "No keys but `name`.")
    return blocks


def _summary(module: ModuleType) -> str:
    return inspect.cleandoc(module.__doc__ or "").split("\n\n")[0].replace("\n", " ")


def _keys(model: type[BaseModel], names: list[str]) -> str:
    rows = []
    for name in names:
        field, schema = model.model_fields[name], _schema(model, name)
        rows.append((f"`{name}`", _kind(schema), _default(field), _meaning(model, name, field)))
    return _grid(("key", "type", "default", "meaning"), rows)


def _meaning(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    family = _family_of(field)
    said = attribute_docs(model).get(name) or field.description or ""
    if family is None:
        return said
    return f"of the [{family}](#methods-{family}){f': {said}' if said else ''}"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "$ref" in schema:
        return "table"
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"] if one.get("type") != "null")
    bounds = ", ".join(f"{sign} {schema[bound]:g}" for bound, sign in BOUNDS.items() if bound in schema)
    name = {"array": "list", "object": "table", None: "any"}.get(schema.get("type"), schema.get("type"))
    inner = f" of {_kind(schema['items'])}" if schema.get("items") else ""
    return " ".join(filter(None, (f"{name}{inner}", bounds)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = to_jsonable_python(field.get_default(call_default_factory=True))
    return "–" if value in (None, "", [], {}) else _code(value)


def _code(value: Any) -> str:
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _options(command: Any) -> list[tuple[str, str, str, str]]:
    """Return the rows of a command's arguments and options."""
    rows = []
    for parameter in command.params:
        stated = inspect.signature(command.callback).parameters[parameter.name]
        kind, info = get_args(stated.annotation)[:2]
        kinds = [WORDS[part] for part in get_args(kind) or (kind,) if part is not NoneType]
        bounds = [f"{sign} {bound}" for sign, bound in (("≥", info.min), ("≤", info.max)) if bound is not None]
        names = [parameter.metavar or parameter.name.upper()] if isinstance(info, ArgumentInfo) else parameter.opts
        default = stated.default
        named = ", ".join(f"`{name}`" for name in names)
        typed = f"{kinds[0]}{'s' * isinstance(kind, GenericAlias)} {', '.join(bounds)}".strip()
        preset = "required" if default is inspect.Parameter.empty else _code(default) if default else "–"
        rows.append((named, typed, preset, str(info.help)))
    return rows


def _fields(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the fields of an answer, those of its objects below them."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        key = "CONTEXT" if name.endswith("_by_context") else "DOMAIN"
        keyed = f".{key}" if get_origin(field.annotation) is dict else ""
        kind = "object" if inner else _kind(_schema(model, name)).replace("table", "object")
        if isinstance(field.annotation, type) and issubclass(field.annotation, Enum):
            kind = ", ".join(_code(one.value) for one in field.annotation)
        yield f"`{path}{name}`", kind, field.description or attribute_docs(model).get(name, "")
        if inner is not None:
            yield from _fields(inner, f"{path}{name}{keyed}.")


def request_errors() -> Iterator[tuple[str, str, str]]:
    """Yield status, code and message of every RequestError in services/ whose status and message stand there."""
    for file in sorted((ROOT / "services").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "RequestError" and len(node.args) > 1):
                continue
            status, message, *rest = node.args
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            code = named.get("code", rest[1] if len(rest) > 1 else None)
            if isinstance(status, ast.Constant) and (text := _text(message)):
                yield str(status.value), f"`{code.value}`" if isinstance(code, ast.Constant) else "–", text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return ""


def _page(*blocks: str) -> str:
    return "\n\n".join(blocks) + "\n"


def _grid(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*head, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(text: str) -> str:
    """Return a text as a table takes it: in one line, its bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write all references."""
    for name, write in REFERENCES.items():
        (ROOT / name).write_text(write(), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
