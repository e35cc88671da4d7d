"""Run the commands of docs/tutorial.md as a reader would: in order, in one shell a part.

    python -m tests.tutorial [PART]

runs one part, counted from 1, or all of them, in an empty folder. A directory with SmolLM2 stands for the id of a model
on the hub.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from models.targets import smollm2

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
# Whatever part of it fails, nothing goes on running.
OPENING = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null || true; redraft down 2>/dev/null || true' EXIT\n"
GRACE_S = 60
# Variables that would make it another run than the reader's; where Python may keep no byte code, every command compiles
# its libraries again.
FOREIGN = ("REDRAFT_", "PREFECT_", "PYTHONDONTWRITEBYTECODE")


def parts() -> list[list[str]]:
    """Return the blocks of commands of each part."""
    _, *sections = re.split(r"^## Part \d+", TUTORIAL.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL) for section in sections]


def run(part: int, folder: Path, **variables: str) -> float:
    """Run one part in an empty folder, and return the seconds that it took.

    Args:
        part: counted from 1.
        folder: gets homes and files.
        variables: of the environment.

    Raises:
        RuntimeError: a command failed; what it printed is on the terminal.
    """
    programs = folder / "bin"
    programs.mkdir()
    for name, module in (("redraft", "-m flows.cli "), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
        program.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    environment = kept | {"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), **variables}
    script = OPENING + "".join(f"cat <<'COMMANDS'\n\n{block}COMMANDS\n{block}" for block in parts()[part - 1])
    started_s = time.monotonic()
    process = subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()
        process.wait(GRACE_S)
        raise
    if code:
        raise RuntimeError(f"part {part} of {TUTORIAL.name} ended with exit code {code}")
    return time.monotonic() - started_s


def main() -> None:
    """Run the parts that the command line names."""
    for part in [int(word) for word in sys.argv[1:]] or range(1, len(parts()) + 1):
        with tempfile.TemporaryDirectory(prefix="redraft-tutorial-") as name:
            folder = Path(name)
            model = folder / "model"
            if part > 1:
                smollm2.build(smollm2.Params(), model)
            seconds = run(part, folder, MODEL=str(model), REDRAFT_HUB="false")
        print(f"part {part}: {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
