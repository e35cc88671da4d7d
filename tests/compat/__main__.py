"""Whether another release of vLLM still has what redraft uses of the installed one.

    python -m tests.compat WHEEL_OR_FOLDER

prints each symbol with both releases, and ends with 1 where one is missing or takes something else that neither the
engine nor the plugin can do without. `make compat` names the newest wheel of the index. Faults come last; "other body"
marks a function that redraft replaces or overrides, and that does something else inside: read it before an upgrade.
"""

import ast
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from models.engines.vllm.patches import OPTIONAL
from tests.compat.check import fault
from tests.compat.tree import Parameters, Tree
from tests.compat.uses import Sources, Use

# Whatever else does not fit ends the start of the engine, or of the plugin.
DISPENSABLE = {f"patches/{name}.py" for name in (*OPTIONAL, "proposer")}


def installed() -> Tree:
    """Return the sources of the release that is installed here; none of it is imported."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed here")
    return Tree.of(Path(spec.submodule_search_locations[0]).parent)


def needed(uses: Iterable[Use]) -> bool:
    """Whether redraft does not start without a symbol that is used so."""
    return any(use.file not in DISPENSABLE for use in uses)


def body(tree: Tree, symbol: str) -> str:
    """Return the text of what a symbol stands for, without comments."""
    found = tree.find(symbol)
    return "" if found is None else ast.unparse(found.node)


def main(path: Path) -> int:
    """Print the table."""
    now, other = installed(), Tree.of(path)
    by_symbol: dict[str, list[Use]] = {}
    for use in Sources().uses():
        by_symbol.setdefault(use.symbol, []).append(use)
    table = Table("symbol", "used in", now.version, other.version, show_lines=False)
    rows, missing, off = [], [], set()
    for symbol, uses in by_symbol.items():
        faulty = [use for use in uses if fault(use, other, now)]
        told = "; ".join(dict.fromkeys(fault(use, other, now) for use in faulty))
        if needed(faulty):
            missing.append(symbol)
        off |= {use.file for use in faulty if use.file in DISPENSABLE}
        if not told and any(isinstance(use.wants, Parameters) for use in uses):
            told = "" if body(now, symbol) == body(other, symbol) else "other body"
        here = "; ".join(dict.fromkeys(filter(None, (fault(use, now, now) for use in uses))))
        files = ", ".join(dict.fromkeys(use.file for use in uses))
        rows.append((bool(faulty), bool(told), symbol.removeprefix("vllm."), files, here or "yes", told or "yes"))
    for row in sorted(rows):
        table.add_row(*row[2:], style="red" if row[0] else None)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    console.print(f"{len(rows)} symbols; off with {other.version}: {', '.join(sorted(off)) or 'nothing'}")
    console.print(f"needed, and not as in {now.version}: {', '.join(missing) or 'nothing'}")
    return bool(missing)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        sys.exit(f"wanted a wheel of vLLM, or a folder that holds vllm/; got {' '.join(sys.argv[1:]) or 'nothing'}")
    sys.exit(main(Path(sys.argv[1])))
