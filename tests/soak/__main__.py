"""`python -m tests.soak`: clients of three keys ask the whole stack for minutes while everything fails in turn.

Ends with what was broken and one line of JSON, where 0 stands for the run and the others for the invariants of
tests/soak/checker.py; exit code 1 where one was, or nothing was answered. The same seed draws the same faults while the
same processes run.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.drills.load import Ended, Load, quiet_answers
from tests.drills.scene import small_disk
from tests.soak.checker import RECOVERY_S, Answer, Fault, Record, promoted, violations
from tests.soak.faults import Faults
from tests.soak.stack import CONSENTS, Stack

DISK_BYTES = 512 << 20
CLIENTS_EACH = 2
PAUSE_S = (1.0, 5.0)


def main() -> int:
    """Run it and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="The whole stack while everything fails.")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long faults happen")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--only", default="", help="deal only what has this in its name")
    options = parser.parse_args()
    print(f"seed {options.seed}: python -m tests.soak --seed {options.seed} --minutes {options.minutes:g}", flush=True)
    folder, broken = Path(tempfile.mkdtemp(prefix="soak-")), {0: ["it did not end"]}
    with small_disk(folder / "home", DISK_BYTES) as has_small_disk:
        try:
            broken = _soak(folder / "home", options, has_small_disk)
        finally:
            if any(broken.values()):
                shutil.copytree(folder / "home", folder / "kept", symlinks=True, ignore=_sockets)
                print(f"what it left is in {folder / 'kept'}", file=sys.stderr)
    if any(broken.values()):
        return 1
    shutil.rmtree(folder)
    return 0


def _soak(home: Path, options: argparse.Namespace, has_small_disk: bool) -> dict[int, list[str]]:
    answers, lock, answered = list[Answer](), threading.Lock(), Counter[str]()
    faults, began_s = list[Fault](), time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began_s:5.0f} s] {line}", flush=True)

    def note(ended: Ended) -> None:
        told = {name: getattr(ended, name) for name in Answer.model_fields.keys() - {"consent"}}
        with lock:
            answered[ended.outcome] += 1
            answers.append(Answer(consent=CONSENTS[ended.asker.key], **told))

    stack = Stack(home)
    try:
        say("built and up")
        quiet = [quiet_answers(stack, asker.prompts, asker.key) for asker in stack.askers]
        wanted = {prompt: one for of_asker in quiet for prompt, one in of_asker.items()}
        say(f"{len(wanted)} answers of a quiet time")
        drawn = Faults(stack, answered, random.Random(options.seed), has_small_disk, options.only)
        pauses = random.Random(options.seed + 1)
        with Load(stack.url, wanted, [*stack.askers * CLIENTS_EACH, stack.stroller], note):
            until_s = time.monotonic() + 60 * options.minutes
            for what, serves, act in drawn.deck():
                before = Counter(answered)
                fault = drawn.do(what, serves, act)
                faults.append(fault)
                ended = ", ".join(f"{name} {num}" for name, num in sorted((answered - before).items()))
                say(f"{what}: whole again after {fault.ended_s - fault.began_s:.1f} s; {ended}")
                if time.monotonic() > until_s or fault.ended_s - fault.began_s >= RECOVERY_S:
                    break
                time.sleep(pauses.uniform(*PAUSE_S))
        say("load ended")
    finally:
        stack.down()
    logged, dropped = stack.logged()
    found = stack.planted([one.golden for one in wanted.values()])
    record = Record(
        answers=tuple(answers),
        faults=tuple(faults),
        looks=tuple(stack.looks),
        spoiled=frozenset(stack.spoiled),
        logged=logged,
        dropped=dropped,
        learned=stack.learned(),
        lines=stack.lines(),
        found=found,
    )
    broken = violations(record)
    if not answered["ok"] or not faults:
        broken[0] = ["nothing was answered, or nothing happened"]
    drafts = [one.lineage for one in stack.registry.versions("draft")]
    for number, lines in broken.items():
        print(f"invariant {number}: {len(lines)} violations", *lines[:5], sep="\n    ")
    for lineage in reversed(drafts):
        if (window := lineage.window) is not None:
            print(f"rows {window.first_seq} to {window.last_seq}: {lineage.gate}, {lineage.gate_reasons}")
    told = {
        "seed": options.seed,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "faults": Counter(fault.what for fault in faults),
        "outcomes": answered,
        "rows": len(logged),
        "rows_lost": dropped,
        "drafts": len(drafts),
        "drafts_of_refreshes": sum(one.window is not None for one in drafts),
        "drafts_promoted_by_refreshes": len(promoted(record)),
        "drafts_served": len({look.draft for look in stack.looks if look.draft is not None}),
        "full_disk": has_small_disk,
        "violations": {number: len(lines) for number, lines in broken.items()},
    }
    print(json.dumps(told))
    return broken


def _sockets(folder: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if (path := Path(folder) / name).is_socket() or path.is_fifo()]


if __name__ == "__main__":
    sys.exit(main())
