"""Plant faults on the way from a request to the draft that it trains, one at a time, and see that tests catch them.

    python -m tests.mutants [--module services/swap ...] [--num 60] [--seed 0]

A mutant is a module with one small change inside a function, in a copy of the last commit. It survives where all tests
of the module pass; none starts an engine, and what only engines reach is left out. A run that was stopped goes on.
"""

import argparse
import ast
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import cache_from_source
from itertools import chain, zip_longest
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tests.imports import ROOT

RESULTS = ROOT / "build" / "mutants.jsonl"  # commit, what was tried, outcome
TEST_LIMIT_S, FILE_LIMIT_S, MEMORY_LIMIT = 120, 300, 12 << 30
# Modules that are tested by the file of that name, and others with their tests.
MIRRORED = {
    "services": "access capture config fair_queue http_server questions reconciler recorder",
    "infra": "artifacts champions consent events keys post_promotion registry regression_sets scrub status store "
    "trigger_store triggers",
    "tasks": "claim_window distill_draft promote regenerate register post_promotion_test",
    "tasks/stages": "samples throttle",
    "tasks/trigger": "acknowledge ask",
    "models/core/evaluation": "acceptance betting clusters drift_detector gate golden paired post_promotion_test "
    "scoring",
    "models/core/learning": "captured distill fitted teacher validation",
    "models/core/throughput": "cost running",
}
ENGINE = "models/engines/vllm"
OTHERS = {
    "services/reverse_proxy": "services/test_request_middleware_alone services/test_reverse_proxy",
    "services/drafts services/probation services/swap": "services/test_swap services/test_reconciler",
    "infra/versions": "infra/test_versions infra/test_registry infra/test_waiting tasks/test_promote",
    "infra/querylog": "infra/test_querylog infra/test_querylog_writer",
    "infra/erasures infra/windows": "infra/test_querylog infra/test_clean tasks/test_claim_window",
    "infra/database": "infra/test_database infra/test_trigger_store",
    "tasks/find_challenger": "tasks/test_register tasks/test_distill_draft tasks/test_find_challenger",
    "tasks/stages/__init__": "tasks/stages/test_stages",
    "tasks/stages/split": "tasks/stages/test_split tasks/stages/test_shares",
    f"{ENGINE}/capture {ENGINE}/fields {ENGINE}/planning {ENGINE}/tap": " ".join(
        f"models/engines/test_vllm_{name}" for name in ("capture", "interrupts", "planning", "tap")
    ),
    "models/core/learning/hidden models/core/learning/loop": (
        "models/core/learning/test_training models/core/learning/test_distill tasks/test_distill_draft"
    ),
    "models/core/learning/answering": "models/core/learning/test_answering models/core/learning/test_own_answers",
    "models/core/throughput/steps": (
        "models/core/throughput/test_cost models/core/throughput/test_expected models/engines/test_vllm_planning"
    ),
}
TESTS = {f"{folder}/{name}": [f"{folder}/test_{name}"] for folder, names in MIRRORED.items() for name in names.split()}
TESTS |= {module: tests.split() for modules, tests in OTHERS.items() for module in modules.split()}
# Survivors that are as good as the original, by the beginnings of their names, with the reason.
EQUIVALENT = {
    "models/core/evaluation/clusters _banded: (signatures[one] == signatures[other]).mean": "a tie of an estimate",
    "services/reverse_proxy _write: 2 → 3  # half=": "any part of a buffer does that leaves room for the last frame",
}

BOUNDARIES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
TOLD = {"debug", "info", "warning", "error", "exception", "table"}  # in logs, and in a run's pages
OPPOSITES = {ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add}


@dataclass(frozen=True)
class Mutant:
    """A module with its bytes from `start` to `end` replaced by `after`."""

    module: str  # its path without suffix
    operator: str
    name: str  # what it is known by while lines move
    line: int
    start: int
    end: int
    after: str

    def text(self, source: bytes) -> bytes:
        """Return the changed module."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def mutants(module: str, root: Path) -> Iterator[Mutant]:
    """Yield all mutants of a module of the tree at `root`."""
    source = (root / f"{module}.py").read_bytes()
    lines, begins = source.splitlines(keepends=True), [0]
    for line in lines:
        begins.append(begins[-1] + len(line))
    for function, node in _nodes(ast.parse(source)):
        for operator, old, after in _changes(node):
            start, end = begins[old.lineno - 1] + old.col_offset, begins[old.end_lineno - 1] + old.end_col_offset
            before, line = (" ".join(text.decode().split()) for text in (source[start:end], lines[old.lineno - 1]))
            name = f"{module} {function}: {before} → {after}{'' if before == line else f'  # {line}'}"
            yield Mutant(module, operator, name, old.lineno, start, end, after)


def draw(modules: Iterable[str], num: int, seed: int, root: Path) -> list[Mutant]:
    """Draw mutants, in turn of each module, and of a module's in turn of each operator."""
    queues = []
    for module in modules:
        rng = random.Random(f"{seed} {module}")  # so that other modules' changes do not matter
        by_operator: dict[str, list[Mutant]] = {}
        for mutant in mutants(module, root):
            by_operator.setdefault(mutant.operator, []).append(mutant)
        queues.append(_in_turn([rng.sample(group, len(group)) for group in by_operator.values()], rng))
    return _in_turn(queues, random.Random(seed))[:num]


def _in_turn(groups: list[list[Mutant]], rng: random.Random) -> list[Mutant]:
    rng.shuffle(groups)
    return [mutant for mutant in chain.from_iterable(zip_longest(*groups)) if mutant]


def _nodes(node: ast.AST, scope: str = "", inside: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Yield what stands in the bodies of functions but for what readers and the type checker are told."""
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    match node:
        case ast.Assert() | ast.Raise() | ast.JoinedStr():
            return
        case ast.Expr(ast.Call(ast.Attribute(attr=name) | ast.Name(name))) if name in TOLD:
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            scope, inside = f"{scope}.{node.name}".lstrip("."), not isinstance(node, ast.ClassDef)
            children = node.body if node.name not in ("__repr__", "__str__") else []
        case ast.AnnAssign(value=value):
            children = [value] if value else []
        case _ if inside:
            yield scope, node
    for child in children:
        yield from _nodes(child, scope, inside)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield changes at a node: the operator's name, what is replaced, and the text that replaces it."""
    match node:
        case ast.Compare(left, [op], right) if type(op) in BOUNDARIES:
            yield "boundary", node, ast.unparse(ast.Compare(left, [BOUNDARIES[type(op)]()], right))
        case ast.BoolOp(op, values):
            yield "and, or", node, ast.unparse(ast.BoolOp(OPPOSITES[type(op)](), values))
        case ast.BinOp(left, ast.Add() | ast.Sub() as op, right) if not _is_text(left) and not _is_text(right):
            yield "plus, minus", node, ast.unparse(ast.BinOp(left, OPPOSITES[type(op)](), right))
        case ast.AugAssign(target, ast.Add() | ast.Sub() as op, value) if not _is_text(value):
            yield "plus, minus", node, ast.unparse(ast.AugAssign(target, OPPOSITES[type(op)](), value))
        case ast.Constant(value) if type(value) is int:
            yield "one more", node, str(value + 1)
        case ast.Return(ast.expr() as value) if not (isinstance(value, ast.Constant) and not value.value):
            yield "nothing returned", node, "return None"
        case ast.Expr(ast.Call() | ast.Await(ast.Call())):
            yield "not called", node, "pass"
        case ast.If(test) | ast.While(test) | ast.IfExp(test):
            yield "negated", test, ast.unparse(ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=tests):
            yield from (("negated", test, ast.unparse(ast.UnaryOp(ast.Not(), test))) for test in tests)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def try_mutant(mutant: Mutant, tests: Iterable[str], root: Path) -> str:
    """Return "survived", "killed" or "timed out", by tests of the tree at `root`, where the module is put back."""
    file = root / f"{mutant.module}.py"
    source = file.read_bytes()
    file.write_bytes(mutant.text(source))
    try:
        return run_tests(tests, root)
    finally:
        file.write_bytes(source)
        # Whether byte code is stale is told by whole seconds and the size, which may be the same.
        Path(cache_from_source(str(file))).unlink(missing_ok=True)


def run_tests(tests: Iterable[str], root: Path) -> str:
    """Run files of tests of the tree at `root`, and leave what pytest prints in its `pytest.log`."""
    files = [f"tests/{name}.py" for name in tests]
    options = ["-x", "-q", "-n", "0", "-m", "not engine", "-p", "no:cacheprovider", "--timeout", str(TEST_LIMIT_S)]
    command = [sys.executable, "-m", "pytest", *options, "--basetemp", str(root.with_name("t")), *files]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with (root / "pytest.log").open("w") as log:
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True)
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    try:
        code = process.wait(FILE_LIMIT_S * len(files))
    except subprocess.TimeoutExpired:
        return "timed out"
    finally:
        with suppress(ProcessLookupError):  # what the tests left running, too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "killed" if code else "survived"


def try_all(drawn: Sequence[Mutant], root: Path, commit: str) -> Iterator[tuple[Mutant, str]]:
    """Yield what becomes of each mutant; what RESULTS has of the commit is not tried again.

    Raises:
        RuntimeError: a test fails without a mutant.
    """
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a+", encoding="utf-8") as lines:
        lines.seek(0)
        known = {what: outcome for of, what, outcome in map(json.loads, lines) if of == commit}
        fresh = sorted({tests for mutant in drawn for tests in TESTS[mutant.module]} - known.keys())
        if fresh and run_tests(fresh, root) != "survived":
            raise RuntimeError((root / "pytest.log").read_text())
        lines.writelines(json.dumps([commit, tests, "passed"]) + "\n" for tests in fresh)
        for mutant in drawn:
            what = f"{mutant.line} {mutant.name}"
            if what not in known:
                known[what] = try_mutant(mutant, TESTS[mutant.module], root)
                print(json.dumps([commit, what, known[what]]), file=lines, flush=True)
            yield mutant, known[what]


def main(argv: Sequence[str] | None = None) -> int:
    """Print what becomes of each mutant; return 1 if one survives that should not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Do the tests catch planted faults?")
    parser.add_argument("--module", action="append", choices=TESTS, metavar="PATH", help="such as services/swap")
    parser.add_argument("--num", type=int, default=60, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    console, found = Console(highlight=False, soft_wrap=True), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="m") as folder:  # short, for the sockets of tests
        root = Path(folder) / "r"
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tree:
            tree.extractall(root, filter="data")
            commit = tree.pax_headers["comment"]
        drawn = draw(arguments.module or TESTS, arguments.num, arguments.seed, root)
        for mutant, outcome in track(try_all(drawn, root, commit), "mutants", len(drawn), console=console):
            if outcome == "survived" and mutant.name.startswith((*EQUIVALENT,)):
                outcome = "equivalent"
            found[outcome] += 1
            console.print(f"{outcome:10} {mutant.line:4} {mutant.name}", markup=False)
    console.print(", ".join(f"{number} {outcome}" for outcome, number in found.items()))
    return 1 if found["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
