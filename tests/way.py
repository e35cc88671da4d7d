"""What one must open to follow a request to the draft that it trains: the files that three starting points reach.

    python -m tests.way [--root CHECKOUT] [--files serving|refresh|both] [--write]

A file reaches what it names: by imports (those inside functions and under `TYPE_CHECKING` too, relative ones, and the
`__init__` of each package above), by dotted strings such as the target of `-m` or a class of the worker's extension,
and by the names of its C++, Lua and HTML. What `import_module` brings in no reader of the file sees, so that
`test_way.py` lists the files that may call it. The figures stand in `way.json`, and the tree may not exceed them;
`--files` tells of each file how many lines it has, how many would leave the way with it, and by whom it was reached.
"""

import argparse
import ast
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.imports import ROOMS, ROOT

FIGURES = Path(__file__).with_name("way.json")
ENGINE = "models.engines.vllm"
SERVING = (
    *("services.service", "services.app", "services.runner", "services.replica"),
    *(f"{ENGINE}.worker", f"{ENGINE}.scheduler", f"{ENGINE}.patches.proposer"),
)
REFRESH = ("flows.refresh",)
WAYS = {"serving": SERVING, "refresh": REFRESH, "both": (*SERVING, *REFRESH)}
OTHER_SOURCES = (".cpp", ".lua", ".html")
DOTTED = re.compile(r"[a-z]\w*(\.\w+)+(:\w+)?")
TEMPLATE = re.compile(r'{%-?\s*(?:extends|include|import|from)\s+"([^"]+)"')

Graph = Mapping[Path, frozenset[Path]]


class Tree:
    """The product's files of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        files = [file for room in ROOMS for file in sorted((root / room).rglob("*")) if file.is_file()]
        self.modules = {_module(file.relative_to(root)): file for file in files if file.suffix == ".py"}
        self.others = [file for file in files if file.suffix in OTHER_SOURCES]

    def graph(self) -> Graph:
        """Return which files each file names."""
        found = {file: frozenset(self._named_by_module(name, file)) - {file} for name, file in self.modules.items()}
        return found | {file: frozenset(self._named_by_template(file)) - {file} for file in self.others}

    def reached(self, starts: Iterable[str], graph: Graph) -> dict[Path, Path | None]:
        """Return the files that the modules `starts` reach, each with the file that led there first."""
        found: dict[Path, Path | None] = dict.fromkeys(self._package(starts))
        queue = deque(found)
        while queue:
            file = queue.popleft()
            for named in sorted(graph[file] - found.keys()):
                found[named] = file
                queue.append(named)
        return found

    def _named_by_module(self, name: str, file: Path) -> Iterator[Path]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from self._package(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(name, node, is_package=file.name == "__init__.py")
                yield from self._package([base, *(f"{base}.{alias.name}" for alias in node.names)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from self._named_by_string(file, node.value)

    def _named_by_string(self, file: Path, text: str) -> Iterator[Path]:
        if DOTTED.fullmatch(text):
            yield from self._package([text.partition(":")[0]])
        if text in OTHER_SOURCES and file.with_suffix(text) in self.others:
            yield file.with_suffix(text)
        if text.endswith(OTHER_SOURCES):
            yield from (other for other in self.others if other.is_relative_to(file.parent) and other.name == text)

    def _named_by_template(self, file: Path) -> Iterator[Path]:
        if file.suffix == ".html":
            names = TEMPLATE.findall(file.read_text(encoding="utf-8"))
            yield from (other for other in self.others if other.parent == file.parent and other.name in names)

    def _package(self, names: Iterable[str]) -> Iterator[Path]:
        """Yield the files of modules, of the packages above them, and of modules whose members are named."""
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                if file := self.modules.get(".".join(parts[:length])):
                    yield file


def measure(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Count the files and lines of each way."""
    tree = Tree(root)
    graph = tree.graph()
    return {name: _size(tree.reached(starts, graph)) for name, starts in WAYS.items()}


def _size(files: Iterable[Path]) -> dict[str, int]:
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
    return {"files": len(lines), "lines": sum(lines)}


def _module(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _absolute(name: str, node: ast.ImportFrom, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = name.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def rows(root: Path, way: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield of each file of a way: its lines, the lines that leave with it, its path, who names it first."""
    tree = Tree(root)
    graph, starts = tree.graph(), WAYS[way]
    reached = tree.reached(starts, graph)
    total = _size(reached)["lines"]
    for file, by in sorted(reached.items()):
        left = tree.reached(starts, {other: named - {file} for other, named in graph.items()})
        through = "" if by is None else str(by.relative_to(root))
        yield _size([file])["lines"], total - _size(left)["lines"], str(file.relative_to(root)), through


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures; list the files of a way, or keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.way", description="How many files a reader must open.")
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--files", choices=WAYS, metavar="WAY", help=f"list the files of one of {', '.join(WAYS)}")
    parser.add_argument("--write", action="store_true", help="keep the figures in way.json")
    arguments = parser.parse_args(argv)
    if arguments.files:
        for lines, leave, file, by in rows(arguments.root, arguments.files):
            print(f"{lines:5} {leave:6} {file:46} {by}")
    found = measure(arguments.root)
    print("\n".join(f"{name:8} {size['files']:4} files {size['lines']:7,} lines" for name, size in found.items()))
    if arguments.write:
        FIGURES.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
