"""How far a service is with compiling its models while it starts, read off the files that it leaves."""

import time
from pathlib import Path

from infra.files import files_under

# What vLLM's compiler leaves: a library for each kernel, and a file for each model whose graph is whole.
KERNELS, MODELS = "*.so", "rank_*/model"


class Compiling:
    """Begins with a start. A start that finds what an earlier one compiled leaves nothing, or a library of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started_s = folder, time.monotonic()
        self._before = self._left()

    def told(self) -> str:
        """Return for how long it has been going on and what was compiled meanwhile, such as "84 s, 12 kernels"."""
        parts = [f"{time.monotonic() - self._started_s:.0f} s"]
        for name, before, now in zip(("kernel", "model"), self._before, self._left(), strict=True):
            if (number := now - before) > 0:
                parts.append(f"{number} {name}{'s' if number > 1 else ''}")
        return ", ".join(parts)

    def _left(self) -> tuple[int, int]:
        files = list(files_under(self._folder))
        return (sum(file.match(KERNELS) for file in files), sum(file.match(MODELS) for file in files))
