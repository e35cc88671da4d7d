"""What every benchmark is given: the recipe, a home of its own, its finished cells, and where to show progress."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TaskID

from infra.environment import environment_of
from infra.machine import describe_machine, git_commit
from infra.processes import Child
from infra.querylog import QueryLog
from infra.settings import Settings, load_settings
from infra.views.results import counting
from models.precision import engine_dtype, gpu_name
from models.recipe import Recipe
from models.sources import Prompt
from tasks.measure.cells import Cells
from tasks.measure.home import Served, copy_log, copy_served
from tasks.select_data import choose_prompts

POLL_S = 0.5


class Run:
    """One benchmark of one recipe, in a process that has entered the benchmark's home.

    Attributes:
        recipe: parsed; `recipe_name` is what the command was given.
        redraft: the program itself, for benchmarks of whole commands.
        settings: of the benchmark's own home.
        folder: where everything of it lies.
        cells: what is measured already.
        setup: what the figures depend on.
    """

    def __init__(
        self,
        name: str,
        recipe: Recipe,
        recipe_name: str,
        folder: Path,
        source: Settings,
        options: dict[str, Any],
        redraft: Sequence[str],
    ) -> None:
        """Open the cells that an earlier run has finished; ValueError if the folder holds cells of another setup."""
        self.folder = folder
        self.settings, self._source = load_settings(), source
        self.recipe, self.recipe_name, self.redraft = recipe, recipe_name, tuple(redraft)
        self.setup = {
            "name": name,
            "options": options,
            "recipe": self.recipe.model_dump(mode="json"),
            "commit": git_commit(),
            "device": {
                **describe_machine(gpu_name(self.settings.device)),
                "dtype": engine_dtype(self.recipe.engine, source.device),
            },
        }
        self.cells = Cells(folder / "cells", self.setup)

    def served(self) -> Served:
        """Copy what is served into this home, once; ValueError if nothing was built yet."""
        return copy_served(self._source, self.settings)

    def logged(self) -> QueryLog:
        """Copy what was logged into this home, once, and open the copy; ValueError if nothing was logged yet."""
        copy_log(self._source, self.settings)
        return QueryLog(self.settings.querylog)

    @cached_property
    def _chosen(self) -> dict[str, dict[str, list[Prompt]]]:
        """Domain to part to prompts; mining a source takes seconds."""
        recipe = self.recipe
        return {domain: choose_prompts(domain, table, recipe.seed) for domain, table in recipe.traffic.items()}

    def by_domain(self, part: str, per_domain: int = 0) -> dict[str, list[Prompt]]:
        """Return the first prompts of a part, "held_out" or "requests", of each domain; all for 0.

        Raises:
            ValueError: a domain has fewer.
        """
        for domain, parts in self._chosen.items():
            if len(parts[part]) < per_domain:
                raise ValueError(
                    f'domain "{domain}" of recipe {self.recipe.name} has {len(parts[part])} {part} prompts, '
                    f"got {per_domain} to measure with"
                )
        return {domain: parts[part][: per_domain or None] for domain, parts in self._chosen.items()}

    def prompts(self, part: str, per_domain: int = 0) -> list[Prompt]:
        """Return the same in one list, domain by domain."""
        return [prompt for of_domain in self.by_domain(part, per_domain).values() for prompt in of_domain]

    def warming(self, most: int = 1) -> list[Prompt]:
        """Return the first requests of each domain to warm an endpoint with: so many, or as many as all have."""
        return self.prompts("requests", min(most, *(table.num_requests for table in self.recipe.traffic.values())))

    def command(self, *arguments: str) -> None:
        """Run a command of `redraft` in the benchmark's home; RuntimeError with the end of its log if it fails."""
        log, name = self.settings.home / "logs" / f"{arguments[0]}.log", f"redraft {arguments[0]}"
        environment = environment_of(self.settings.home)
        with self.bar(name, 1) as bar, Child.start([*self.redraft, *arguments], environment, log, name) as child:
            while (code := child.poll()) is None:
                time.sleep(POLL_S)
            bar.advance()
        if code:
            raise RuntimeError(f"{name} ended with {code}\n{child.tail()}")

    @contextmanager
    def bar(self, what: str, total: int) -> "Iterator[Bar]":
        """Show how far a cell is."""
        with counting() as progress:
            yield Bar(progress, progress.add_task(what, total=total))


class Bar(NamedTuple):
    """A cell's progress."""

    progress: Progress
    task: TaskID

    def advance(self, *_: object) -> None:
        """One more is done; takes whatever a callback is given."""
        self.progress.advance(self.task)

    def show(self, done: float) -> None:
        """So much is done."""
        self.progress.update(self.task, completed=done)
