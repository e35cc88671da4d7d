"""vLLM's sources, read with `ast` and never imported: a wheel for another machine is read as well."""

import ast
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINED = re.compile(rb"^(?:class|def|async def) (\w+)", re.MULTILINE)
VERSION = re.compile(r"__version__ = version = '([^']+)'")


class Found(NamedTuple):
    """What a symbol is.

    Attributes:
        node: its definition; an attribute's is the node that sets it.
        module: that it is defined in.
        of_class: it belongs to a class.
        elsewhere: it may come from a base class that is not vLLM's, or from `__getattr__`; then `node` is the class.
    """

    node: ast.AST
    module: str
    of_class: bool = False
    elsewhere: bool = False


class Parameters(NamedTuple):
    """Parameters of a function, as its caller sees them.

    Attributes:
        names: that may be passed by position.
        num_required: of `names`, those without a default.
        keywords: that are passed by name alone; `free` are those with a default.
        rest, options: whether it takes further ones by position, and by name.
    """

    names: tuple[str, ...]
    num_required: int
    keywords: tuple[str, ...]
    free: frozenset[str]
    rest: bool
    options: bool

    @classmethod
    def of(cls, node: Function, bound: bool) -> "Parameters":
        """Read them; of a `bound` method without the first."""
        args = node.args
        decorators = {one.id for one in node.decorator_list if isinstance(one, ast.Name)}
        skipped = int(bound and "staticmethod" not in decorators)
        names = [one.arg for one in (*args.posonlyargs, *args.args)]
        num_required = max(len(names) - len(args.defaults) - skipped, 0)
        keywords = tuple(one.arg for one in args.kwonlyargs)
        defaults = zip(keywords, args.kw_defaults, strict=True)
        free = frozenset(name for name, default in defaults if default is not None)
        return cls(
            tuple(names[skipped:]), num_required, keywords, free, args.vararg is not None, args.kwarg is not None
        )

    def __str__(self) -> str:
        """Return them as in a definition, without defaults."""
        rest = ["*args"] if self.rest else ["*"] if self.keywords else []
        return f"({', '.join([*self.names, *rest, *self.keywords, *(['**options'] if self.options else [])])})"

    def why_not_called(self, num: int, names: frozenset[str], spread: bool) -> str:
        """Return why they can't be passed `num` by position and others by name; `spread` may bring any more."""
        if num > len(self.names) and not self.rest:
            return f"takes {self}, not {num} by position"
        if unknown := sorted(names - {*self.names[num:], *self.keywords}) if not self.options else []:
            return f"takes {self}, not {', '.join(unknown)}"
        wanted = {*self.names[num : self.num_required], *self.keywords} - self.free
        if not spread and (missing := sorted(wanted - names)):
            return f"takes {self}, and wants {', '.join(missing)}"
        return ""

    def why_not_replaced(self, ours: "Parameters", before: "Parameters") -> str:
        """Return why a function with parameters `ours`, written when these were `before`, can't stand in its place."""
        told = f"takes {self}, not {before}" if before != self else f"takes {self}, replaced by {ours}"
        for place, name in enumerate(self.names):
            if place < len(ours.names):
                if before.names[place : place + 1] != (name,):
                    return told
            elif not ours.rest and not (ours.options or name in ours.keywords):
                return told
        taken = ours.options or {*ours.names, *ours.keywords}.issuperset(self.keywords)
        wanted = {*ours.keywords} - ours.free
        enough = ours.num_required <= len(self.names) or self.rest
        return "" if taken and enough and wanted <= {*self.names, *self.keywords} else told


class Tree:
    """The sources of one release.

    Args:
        names: of its files, from the folder that holds `vllm/` on.
        read: returns a file's content.
    """

    def __init__(self, names: frozenset[str], read: Callable[[str], bytes]) -> None:
        self.names, self.read = names, read
        self._namespace, self.find = cache(self._namespace), cache(self.find)  # type: ignore[method-assign]
        self.names_in = cache(self.names_in)  # type: ignore[method-assign]

    @classmethod
    def of(cls, path: Path) -> "Tree":
        """Read a wheel, or a folder that holds `vllm/`."""
        if path.is_dir():
            names = (file.relative_to(path).as_posix() for file in path.glob("vllm/**/*.py"))
            return cls(frozenset(names), lambda name: (path / name).read_bytes())
        wheel = zipfile.ZipFile(path)
        return cls(frozenset(name for name in wheel.namelist() if re.fullmatch("vllm/.*py", name)), wheel.read)

    @property
    def version(self) -> str:
        """What the release calls itself."""
        told = VERSION.search(self.read("vllm/_version.py").decode())
        return told[1] if told else "unknown"

    def find(self, symbol: str) -> Found | None:
        """Return what a dotted name stands for, through re-exports, base classes and annotations; None if nothing."""
        parts = symbol.split(".")
        for end in range(len(parts), 0, -1):
            if (tree := self._module(module := ".".join(parts[:end]))) is not None:
                return self._inside(module, tree, parts[end:])
        return None

    def moved(self, symbol: str) -> str:
        """Return where else a module, class or function of this name is defined; "" if nowhere or in several places."""
        places = self._places[symbol.rpartition(".")[2]]
        return places[0] if len(places) == 1 else ""

    def parameters(self, found: Found) -> Parameters | None:
        """Return what a function takes, or a class to be made; None if that is not told in vLLM's sources."""
        if isinstance(found.node, Function):
            return Parameters.of(found.node, found.of_class)
        if not isinstance(found.node, ast.ClassDef):
            return None
        made = self._member(found.node, found.module, "__init__")
        if made is not None and not made.elsewhere:
            return self.parameters(made)
        classes = [*self._classes(found.node, found.module)]
        lines = [line for node, _ in classes if node is not None for line in node.body]
        fields = tuple(ast.unparse(line.target) for line in lines if isinstance(line, ast.AnnAssign))
        return Parameters(fields, 0, (), frozenset(), False, False) if fields else None

    def names_in(self, module: str) -> frozenset[str]:
        """Return every attribute, function and string that a module's source names."""
        nodes = [*ast.walk(self._module(module) or ast.Module([], []))]
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        return frozenset(texts | names | {node.name for node in nodes if isinstance(node, Function)})

    @cached_property
    def _places(self) -> Mapping[str, list[str]]:
        """The modules, and what they define, by the last part of the name."""
        found = defaultdict(list)
        for file in self.names:
            module = _dotted(file)
            for place in (module, *(f"{module}.{name.decode()}" for name in DEFINED.findall(self.read(file)))):
                found[place.rpartition(".")[2]].append(place)
        return found

    def _module(self, name: str) -> ast.Module | None:
        stem = name.replace(".", "/")
        file = next((one for one in (f"{stem}/__init__.py", f"{stem}.py") if one in self.names), None)
        return None if file is None else _parse(self.read(file))

    def _namespace(self, module: str) -> dict[str, ast.AST | str]:
        """Return what a module defines, or from where it has it."""
        package = module if f"{module.replace('.', '/')}/__init__.py" in self.names else module.rpartition(".")[0]
        found: dict[str, ast.AST | str] = {}
        for node in _statements(self._module(module) or ast.Module([], [])):
            if isinstance(node, Function | ast.ClassDef):
                if not any("overload" in ast.unparse(one) for one in node.decorator_list):
                    found.setdefault(node.name, node)
            elif isinstance(node, ast.Import):
                found |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom):
                base = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(part for part in (base, node.module) if part)
                for alias in node.names:
                    name = alias.asname or alias.name
                    found.setdefault(name if alias.name != "*" else f"*{source}", f"{source}.{alias.name}")
            else:
                for name in _targets(node):
                    found.setdefault(name, node)
        return found

    def _inside(self, module: str, tree: ast.AST, rest: list[str]) -> Found | None:
        if not rest:
            return Found(tree, module)
        namespace = self._namespace(module)
        node = namespace.get(rest[0])
        if node is None:
            starred = (self.find(".".join([source[1:], *rest])) for source in namespace if source.startswith("*"))
            return next((found for found in starred if found is not None), None)
        if isinstance(node, str):
            return self.find(".".join([node, *rest[1:]])) if node != f"{module}.{rest[0]}" else None
        found: Found | None = Found(node, module)
        for name in rest[1:]:
            if found is not None and isinstance(found.node, ast.AnnAssign):
                found = self._named(ast.unparse(found.node.annotation), found.module)
            if found is None or not isinstance(found.node, ast.ClassDef):
                return found and found._replace(elsewhere=True)
            found = self._member(found.node, found.module, name)
        return found

    def _named(self, name: str, module: str) -> Found | None:
        name = name.strip("\"'").partition("[")[0]
        return self.find(f"{module}.{name}") if self._module(module) is not None else None

    def _classes(self, node: ast.ClassDef, module: str) -> Iterator[tuple[ast.ClassDef | None, str]]:
        """Yield a class and its bases; None for one that is not vLLM's."""
        yield node, module
        for base in node.bases:
            found = self._named(ast.unparse(base), module)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield from self._classes(found.node, found.module)
            elif ast.unparse(base).partition("[")[0] not in ("object", "ABC", "Generic", "Protocol"):
                yield None, module

    def _member(self, node: ast.ClassDef, module: str, name: str) -> Found | None:
        classes = [*self._classes(node, module)]
        for one, where in classes:
            member = None if one is None else _members(one).get(name)
            if member is not None and (one is node or not _is_abstract(member)):
                return Found(member, where, of_class=True)
        delegates = any(one is not None and "__getattr__" in _members(one) for one, _ in classes)
        if delegates or any(one is None for one, _ in classes):
            return Found(node, module, of_class=True, elsewhere=True)
        return None


@lru_cache(maxsize=512)
def _parse(content: bytes) -> ast.Module:
    return ast.parse(content)


def _statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Yield a module's or class's statements, those under an `if` or `try` too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(child)
        elif isinstance(child, ast.stmt):
            yield child


def _targets(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement assigns to, and the attributes, as "self.name"."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            if isinstance(one, ast.Name):
                yield one.id
            elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
                yield f"{one.value.id}.{one.attr}"


@lru_cache(maxsize=512)
def _members(node: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for line in _statements(node):
        if isinstance(line, Function | ast.ClassDef):
            found.setdefault(line.name, line)
        else:
            found |= {name: line for name in _targets(line) if name not in found}
    for line in ast.walk(node):
        if isinstance(line, (ast.Assign, ast.AnnAssign)):
            for name in _targets(line):
                if name.startswith("self."):
                    found.setdefault(name.removeprefix("self."), line)
    return found


def is_classmethod(node: ast.AST) -> bool:
    """Whether a method is called with its class in the place of an object."""
    return isinstance(node, Function) and "classmethod" in map(ast.unparse, node.decorator_list)


def _is_abstract(node: ast.AST) -> bool:
    """Whether a method only says what subclasses have."""
    return isinstance(node, Function) and "abstractmethod" in map(ast.unparse, node.decorator_list)


def _dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
