"""Programs that run to their end and print what they found."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.processes import Child

POLL_S = 1.0


def run_program(argv: Sequence[str], environment: Mapping[str, str], log: Path, name: str) -> dict[str, Any]:
    """Run a program and return the last JSON object among its lines.

    Args:
        argv: the program and its arguments.
        environment: variables added to this process's own.
        log: where its output goes; what was there is lost.
        name: what messages call it.

    Raises:
        RuntimeError: it failed or printed no JSON object; the message has the end of its log.
    """
    log.unlink(missing_ok=True)
    with Child.start(argv, environment, log, name) as child:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
    # Libraries say goodbye on standard error, which is in the same file.
    objects = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    if code or not objects:
        raise RuntimeError(f"{name} ended with {code} and {len(objects)} results\n{child.tail()}")
    found: dict[str, Any] = json.loads(objects[-1])
    return found
