"""What redraft uses of vLLM's inside, read from its own sources.

A use is a dotted name of vLLM's with what is wanted of it. Found are: what is imported, also by a dotted string; what
is read off it; calls, with how they pass; functions and classes that `patches.replace` or an assignment replaces, with
the parameters of what stands in their place; methods that a subclass overrides, which say "See the base class"; what
the `Replaces:` lines of a patch name; names given to `require`, `getattr` and `setattr`; environment variables.

vLLM's objects come to our code without types, and their names tell what they are: `holders`.

Reading can't see, but for what is DECLARED: what is reached through objects that `holders` does not name, or by names
that are put together; settings in dicts, such as a draft's method; what a function computes, in which order vLLM calls
it, and what a tensor holds; operators in C++; anything of torch.
"""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.compat.holders import DECLARED, HOLDERS, IN_FILE, STRINGS
from tests.compat.tree import Function, Parameters
from tests.imports import ROOT

PACKAGE = ROOT / "models" / "engines" / "vllm"
MODULE = "models.engines.vllm"
DOTTED = re.compile(r"vllm(\.\w+)+")
REPLACED = re.compile(r"`(vllm\.[^`]+)`")
VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
# What the docstring of an override mentions, and what begins attributes of ours on vLLM's objects.
OVERRIDES, OWN = re.compile("base class|vLLM's protocol"), ("redraft_", "_redraft_")
# A source of vLLM's that is read as text.
FILE = re.compile(r"(\w+(?:/\w+)*?)(/__init__)?\.py")


class Call(NamedTuple):
    """How something is called: see `Parameters.why_not_called`; `by_class` is a method of a class, not of an object."""

    num: int
    names: frozenset[str]
    spread: bool
    by_class: bool = False


class Use(NamedTuple):
    """A name of vLLM's that a file uses.

    Attributes:
        symbol: the dotted name.
        file: relative to the engine's package.
        line: in it.
        wants: how it is called, or what is put in its place; None if it only has to be there.
        keyword: a parameter that it has to have, or what a module has to name; "" if none.
        looked_up: whether that it is missing is noticed at the start: it is imported, replaced or required.
    """

    symbol: str
    file: str
    line: int
    wants: Call | Parameters | None = None
    keyword: str = ""
    looked_up: bool = False


class Subclass(NamedTuple):
    """A class of ours with a base of vLLM's; what it defines itself, and what it overrides."""

    base: str
    own: frozenset[str]
    overridden: frozenset[str]


class Sources:
    """The files that may import vLLM, and the classes in them that are subclasses of vLLM's."""

    def __init__(self, folder: Path = PACKAGE) -> None:
        files = sorted(folder.rglob("*.py"))
        self.trees = {file.relative_to(folder).as_posix(): ast.parse(file.read_text()) for file in files}
        self.constants = {name: _constants(tree) for name, tree in self.trees.items()}
        self.classes: dict[str, Subclass] = {}
        for tree in self.trees.values():
            imports = imported(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    bases = [imports.get(ast.unparse(base).partition("[")[0], "") for base in node.bases]
                    bases = [HOLDERS[node.name]] if node.name in HOLDERS else bases
                    if (base := next((one for one in bases if DOTTED.fullmatch(one)), None)) is not None:
                        methods = [one for one in node.body if isinstance(one, Function)]
                        overridden = frozenset(one.name for one in methods if _overrides(one))
                        self.classes[node.name] = Subclass(base, frozenset(_own(node)), overridden)

    def uses(self) -> list[Use]:
        """Return every use, by symbol and place."""
        found: set[Use] = set()
        for name, tree in self.trees.items():
            reader = _Reader(name, tree, self)
            reader.visit(tree)
            found |= reader.found
        return sorted(found, key=lambda use: (use.symbol, use.file, use.line, str(use.wants), use.keyword))


def imported(tree: ast.AST) -> dict[str, str]:
    """Return what each name that a file imports stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = (alias.name if alias.asname else alias.name.partition(".")[0] for alias in node.names)
            found |= {alias.asname or name: name for alias, name in zip(node.names, names, strict=True)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found.setdefault(alias.asname or alias.name, f"{node.module}.{alias.name}")
    return found


class _Reader(ast.NodeVisitor):
    """Reads one file."""

    def __init__(self, file: str, tree: ast.Module, sources: Sources) -> None:
        self.file, self.sources, self.found = file, sources, set[Use]()
        self.imports = imported(tree)
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)}
        self.holders = {**HOLDERS, **IN_FILE.get(file, {})}
        self.scopes: list[dict[str, str]] = [{}]
        self.klass = ""
        self.instances: dict[str, str] = {}  # what a function that replaces a method is called with
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("replace") and len(node.args) == 3:
                self.instances[ast.unparse(node.args[2])] = self.kind(node.args[0])

    def use(
        self,
        symbol: str,
        node: ast.AST,
        wants: Call | Parameters | None = None,
        keyword: str = "",
        looked_up: bool = False,
    ) -> None:
        """Note a use."""
        symbol, _, attribute = symbol.partition(":.")
        if symbol in STRINGS:
            symbol, keyword = STRINGS[symbol], symbol
        keyword = keyword or attribute
        if DOTTED.fullmatch(symbol):
            self.found.add(Use(symbol, self.file, node.lineno, wants, keyword, looked_up))  # type: ignore[attr-defined]

    def kind(self, node: ast.AST) -> str:
        """Return the class of vLLM's, or of ours under one, that an expression is an instance of; or what it names."""
        if isinstance(node, ast.Name):
            for scope in reversed(self.scopes):
                if node.id in scope:
                    return scope[node.id]
            return self.imports.get(node.id) or self._held(node.id) or ""
        if isinstance(node, ast.Attribute):
            base = self.kind(node.value)
            if (held := self._held(node.attr)) is not None:
                return held
            return f"{base}.{node.attr}" if DOTTED.fullmatch(base) and not _is_class(base) else ""
        if isinstance(node, ast.Call):
            named = self.kind(node.func)
            if _is_class(named):
                return named
            return self.holders.get(ast.unparse(node.func).rpartition(".")[2], "")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self.holders.get(str(node.slice.value), "")
        if isinstance(node, ast.BinOp):  # of an annotation
            return self.kind(node.left)
        return ""

    def _held(self, name: str) -> str | None:
        return self.holders.get(name, self.holders.get(name.lstrip("_")))

    def member(self, owner: ast.AST, name: str) -> str:
        """Return the symbol of an attribute of an expression; "" if it is none of vLLM's."""
        if isinstance(owner, ast.Call) and ast.unparse(owner) == "super()":
            base: str = self.klass
        else:
            base = self.kind(owner)
            if (ours := self.sources.classes.get(base)) is not None:
                if name in ours.own:
                    return ""
                base = ours.base
        return "" if not DOTTED.match(base) or name.startswith((*OWN, "__dict__", "__class__")) else f"{base}.{name}"

    def names(self, node: ast.AST) -> list[str]:
        """Return the strings that an argument is: a constant, its name, or a tuple of them."""
        if isinstance(node, ast.Starred):
            return self.names(node.value)
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else []
        file, name = self.file, ast.unparse(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            file, name = _file(self.imports.get(node.value.id, "")), node.attr
        elif name in self.imports and self.imports[name].startswith(MODULE):
            file = _file(self.imports[name].rpartition(".")[0])
        return [*self.sources.constants.get(file, {}).get(name, ())]

    def visit_Module(self, node: ast.Module) -> None:
        told = ast.get_docstring(node, clean=False) or ""
        for symbol in REPLACED.findall(told.partition("\nReplaces:")[2].partition("\nTried with:")[0]):
            self.use(symbol, node.body[0], looked_up=True)
        for symbol in DECLARED.get(self.file, ()):
            self.use(symbol, node.body[0])
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.use(f"{node.module}.{alias.name}", node, looked_up=True)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.use(node.value, node)
            if VARIABLE.fullmatch(node.value):
                self.use(f"vllm.envs.{node.value}", node)
            if (file := FILE.fullmatch(node.value)) is not None and "/" in node.value:
                self.use(f"vllm.{file[1].replace('/', '.')}", node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        ours = self.sources.classes.get(node.name)
        outer, self.klass = self.klass, "" if ours is None else ours.base
        self.scopes.append({"self": node.name} if self.klass else {})
        self.generic_visit(node)
        self.scopes.pop()
        self.klass = outer

    def visit_FunctionDef(self, node: Function) -> None:
        if self.klass and _overrides(node):
            self.use(f"{self.klass}.{node.name}", node, Parameters.of(node, bound=True))
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        kinds = {one.arg: self.kind(one.annotation) if one.annotation is not None else "" for one in args}
        scope = {name: kind for name, kind in kinds.items() if DOTTED.match(kind) or kind in self.sources.classes}
        if len(args) > 1 and _is_class(owner := self.instances.get(node.name, "")):
            scope.setdefault(args[1].arg, owner)
        self.scopes.append(scope)
        self.generic_visit(node)
        self.scopes.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        tests = [
            one for one in ast.walk(node.test) if isinstance(one, ast.Call) and ast.unparse(one.func) == "isinstance"
        ]
        narrowed = {ast.unparse(one.args[0]): self.kind(one.args[1]) for one in tests}
        negated = isinstance(node.test, ast.UnaryOp)
        self.scopes.append({} if negated else {name: kind for name, kind in narrowed.items() if DOTTED.match(kind)})
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assign(node.targets, node.value, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign([node.target], node.value, node)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr, node: ast.AST) -> None:
        self.generic_visit(node)
        for target in targets:
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = [*zip(target.elts, value.elts, strict=True)]
            for one, of in pairs:
                if isinstance(one, ast.Name) and (kind := self.kind(of)):
                    self.scopes[-1][one.id] = kind
                elif isinstance(one, ast.Attribute) and (symbol := self.member(one.value, one.attr)):
                    self._replace(symbol, of, own=False)

    def _replace(self, symbol: str, new: ast.expr, own: bool) -> None:
        """Note that something of ours takes a symbol's place; with `own`, it is handed vLLM's first."""
        is_method = isinstance(new, ast.Attribute) and ast.unparse(new.value) == "self"
        node = self.functions.get(new.attr if isinstance(new, ast.Attribute) else ast.unparse(new))
        if isinstance(node, Function) and (is_method or isinstance(new, ast.Name)):
            ours = Parameters.of(node, bound=is_method or own)
            if _is_class(symbol.rpartition(".")[0]) and not is_method:  # a class's own method
                ours = ours._replace(names=ours.names[1:], num_required=ours.num_required - 1)
            self.use(symbol, new, ours)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if symbol := self.member(node.value, node.attr):
            self.use(symbol, node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        taken = self.holders.get(f"{ast.unparse(node.value)}[]")
        if taken is not None and isinstance(node.slice, ast.Constant):
            self.use(taken, node, keyword=str(node.slice.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        keywords = {one.arg for one in node.keywords if one.arg is not None}
        spread = any(one.arg is None for one in node.keywords) or any(isinstance(one, ast.Starred) for one in node.args)
        for one in node.keywords:
            if one.arg is None and isinstance(one.value, ast.Dict):
                keywords |= {key.value for key in one.value.keys if isinstance(key, ast.Constant)}
        if called in ("require", "getattr", "setattr", "hasattr", "replace") and len(node.args) > 1:
            for name in (name for arg in node.args[1:] for name in self.names(arg)):
                if symbol := self.member(node.args[0], name):
                    self.use(symbol, node, looked_up=called == "require")
                    if called == "replace" and len(node.args) == 3:
                        self._replace(symbol, node.args[2], own=True)
        if called == "replace" and keywords:
            holder = node.args[0] if node.args else getattr(node.func, "value", node)
            for name in keywords:
                self.use(self.member(holder, name), node)
        elif isinstance(node.func, ast.Name) and DOTTED.fullmatch(symbol := self.kind(node.func)):
            num = sum(not isinstance(one, ast.Starred) for one in node.args)
            self.use(symbol, node, Call(num, frozenset(keywords), spread))
        elif isinstance(node.func, ast.Attribute) and (symbol := self.member(node.func.value, node.func.attr)):
            num = sum(not isinstance(one, ast.Starred) for one in node.args)
            owner = self.kind(node.func.value)
            by_class = _is_class(owner) and self.imports.get(ast.unparse(node.func.value)) == owner
            if owner not in self.sources.classes or node.func.attr not in self.sources.classes[owner].overridden:
                self.use(symbol, node, Call(num, frozenset(keywords), spread, by_class))
        self.generic_visit(node)


def _file(module: str) -> str:
    return f"{module.removeprefix(f'{MODULE}.').replace('.', '/')}.py"


def _overrides(node: Function) -> bool:
    return bool(OVERRIDES.search(ast.get_docstring(node) or ""))


def _is_class(symbol: str) -> bool:
    return symbol.rpartition(".")[2][:1].isupper()


def _constants(tree: ast.Module) -> Mapping[str, tuple[str, ...]]:
    """Return a module's constants that are strings, or tuples of such."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = [*zip(target.elts, node.value.elts, strict=True)]
                for name, value in pairs:
                    if (texts := _texts(value, found)) is not None:
                        found[ast.unparse(name)] = texts
    return found


def _texts(node: ast.AST, known: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Tuple):
        parts = [_texts(one, known) for one in node.elts]
        return None if None in parts else tuple(text for part in parts if part is not None for text in part)
    return None


def _own(node: ast.ClassDef) -> Iterator[str]:
    """Yield what a class of ours defines; what it annotates as Any is the base's."""
    for one in ast.walk(node):
        if isinstance(one, Function):
            if not _overrides(one):
                yield one.name
        elif isinstance(one, ast.AnnAssign) and ast.unparse(one.annotation) != "Any":
            yield ast.unparse(one.target).removeprefix("self.")
        elif isinstance(one, ast.Assign):
            of_class = one in node.body
            for target in one.targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if of_class or (
                        ast.unparse(part).startswith("self.") and ast.unparse(part) not in ast.unparse(one.value)
                    ):
                        yield ast.unparse(part).removeprefix("self.")
