"""Whether another release of vLLM still has what redraft uses of the installed one.

    python -m tests.compat WHEEL_OR_FOLDER

prints each symbol with both releases, and ends with 1 where one is missing or takes something else that neither the
engine nor the plugin can do without. `make compat` names the newest wheel of the index. Faults come last. "other body"
marks a function that redraft replaces or overrides, and that does something else inside: read it before an upgrade.
"not told": it comes from a base class that is not vLLM's, or is set by whoever has the object.
"""

import ast
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from models.engines.vllm.patches import OPTIONAL
from tests.compat.check import fault
from tests.compat.tree import Parameters, Tree
from tests.compat.uses import Sources, Use

YES, MISSING = "yes", ("gone", "moved")
# Whatever else does not fit ends the start of the engine, or of the plugin.
DISPENSABLE = {f"patches/{name}.py" for name in (*OPTIONAL, "proposer")}


def installed() -> Tree:
    """Return the sources of the release that is installed here; none of it is imported."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("vLLM is not installed here")
    return Tree.of(Path(spec.submodule_search_locations[0]).parent)


def needed(faults: Mapping[Use, str]) -> bool:
    """Whether redraft can't do without what a release has otherwise; a patch is left out if that is noticed in time."""
    noticed = any(use.looked_up for use in faults) and all(told.startswith(MISSING) for told in faults.values())
    return bool(faults) and not (noticed and all(use.file in DISPENSABLE for use in faults))


def state(uses: Sequence[Use], tree: Tree, before: Tree) -> str:
    """Return how a release has a symbol: as redraft uses it, by what it differs, or that its sources don't tell."""
    told = dict.fromkeys(fault(use, tree, before) for use in uses)
    found = tree.find(uses[0].symbol)
    return "; ".join(filter(None, told)) or ("not told" if found is not None and found.elsewhere else YES)


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
    table = Table("symbol", "used in", now.version, other.version)
    rows, missing, off = [], [], set()
    for symbol, uses in by_symbol.items():
        faulty = {use: told for use in uses if (told := fault(use, other, now))}
        told = state(uses, other, now)
        if needed(faulty):
            missing.append(symbol)
        else:
            off |= {use.file for use in faulty}
        if not faulty and any(isinstance(use.wants, Parameters) for use in uses):
            told = told if body(now, symbol) == body(other, symbol) else "other body"
        files = ", ".join(dict.fromkeys(use.file for use in uses))
        rows.append((bool(faulty), told != YES, symbol.removeprefix("vllm."), files, state(uses, now, now), told))
    for is_faulty, _, *cells in sorted(rows):
        table.add_row(*cells, style="red" if is_faulty else None)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    console.print(f"{len(rows)} symbols; off with {other.version}: {', '.join(sorted(off)) or 'nothing'}")
    console.print(f"needed, and not as in {now.version}: {', '.join(missing) or 'nothing'}")
    return bool(missing)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).exists():
        sys.exit(f"wanted a wheel of vLLM, or a folder that holds vllm/; got {' '.join(sys.argv[1:]) or 'nothing'}")
    sys.exit(main(Path(sys.argv[1])))
