"""What every benchmark is given: the recipe, a home of its own, its finished cells, and where to show progress.

That home holds copies of the target, of the served draft's line, and of the log.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress, TaskID, TimeRemainingColumn
from sqlalchemy import delete

from infra.artifacts import Artifact, publish
from infra.database import Database, copy_database
from infra.environment import environment_of
from infra.home import SPLIT_KEY, home_secret
from infra.machine import describe_machine, git_commit
from infra.processes import Child
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import Settings, load_settings
from infra.tables import OF_HOME
from infra.versions import Pair, ancestors
from infra.views.results import counting
from models.core.layers.kernels import engine_dtype, gpu_name
from models.recipe import Recipe
from models.sources import Prompt
from models.types import Frozen, Kind
from tasks.measure.cells import Cells
from tasks.promote import MADE_BY
from tasks.select_data import choose_prompts

POLL_S = 0.5


class Served(Frozen):
    """What a home's registry holds, numbered from 1.

    `originals` are the numbers of the drafts where they were copied from, oldest first; the last one is the champion.
    """

    originals: tuple[int, ...]

    @property
    def champion(self) -> int:
        """The number of the champion's copy; that of the first draft is 1."""
        return len(self.originals)


class Run:
    """One benchmark of one recipe, in a process that has entered the benchmark's home.

    `recipe_name` is what the command was given, `redraft` the program itself, for benchmarks of whole commands, `setup`
    what the figures depend on, and `folder` where all of it lies.
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
        """Return domain to its first prompts of "held_out" or "requests", all for 0; ValueError if it has fewer."""
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
        with counting(TimeRemainingColumn()) as progress:
            yield Bar(progress, progress.add_task(what, total=total))


class Bar(NamedTuple):
    progress: Progress
    task: TaskID

    def advance(self, *_: object) -> None:
        """One more is done; takes whatever a callback is given."""
        self.progress.advance(self.task)

    def show(self, done: float) -> None:
        self.progress.update(self.task, completed=done)


def copy_served(source: Settings, home: Settings) -> Served:
    """Register copies of the champion target, the champion draft and the drafts that it descends from.

    A copy that was not finished is made anew. ValueError if nothing was built yet.
    """
    file = home.home / "copied.json"
    if file.is_file():
        return Served.model_validate_json(file.read_bytes())
    registry = open_registry(source)
    target, draft = registry.champion("target"), registry.champion("draft")
    if target is None or draft is None:
        raise ValueError("the registry has no champion target and draft yet; run: redraft build --recipe FILE")
    line = ancestors(registry, draft)[::-1]
    fetched = home.home / "fetched"
    for path in (fetched, home.local_artifacts, home.cache):
        shutil.rmtree(path, ignore_errors=True)
    for path in home.home.glob("mlflow.db*"):
        path.unlink()
    copies = open_registry(home)
    made_by = {MADE_BY: target.tags[MADE_BY]} if MADE_BY in target.tags else {}  # a recipe is known by it
    copied = copies.register("target", registry.download(target, fetched), target.target.to_tags() | made_by)
    copies.promote("target", copied.number)
    for number, version in enumerate(line, start=1):
        # Whom it was gated against may not be among the copies.
        numbers = {"parent": number - 1 or None, "gated_against": None, "target_version": copied.number}
        lineage = version.lineage.model_copy(update=numbers)
        copies.register("draft", registry.download(version, fetched), lineage.to_tags())
        copies.promote("draft", number)
    shutil.rmtree(fetched)
    served = Served(originals=tuple(version.number for version in line))
    file.write_text(served.model_dump_json() + "\n")
    return served


def files_of(home: Settings, kind: Kind, number: int) -> Artifact:
    registry = open_registry(home)
    return publish(registry.download(registry.get(kind, number), home.cache), kind)


def first_pair(home: Settings) -> Pair:
    """Return the target and the first draft of the line that was copied."""
    registry = open_registry(home)
    return Pair(
        target=registry.get("target", 1),
        draft=registry.get("draft", 1),
        target_files=files_of(home, "target", 1),
        draft_files=files_of(home, "draft", 1),
    )


def copy_log(source: Settings, home: Settings) -> None:
    """Copy the log once, with cursor, regression sets and the secret of splits, but not what its home serves or wants.

    ValueError if nothing was logged.
    """
    if not isinstance(source.querylog, Path):
        raise ValueError("the query log is on Postgres; what measures on served requests takes a copy of a file")
    if (log := QueryLog(home.querylog)).last_seq():
        return
    log.close()
    if not source.querylog.is_file() or not QueryLog(source.querylog).last_seq():
        nothing = f"there is nothing in query log {source.querylog}"
        raise ValueError(f"{nothing}; serve some requests first, or run: redraft demo")
    home_secret(source.home)  # one that was never drawn is drawn there, so that both split alike
    shutil.copy(source.home / SPLIT_KEY, home.home / SPLIT_KEY)
    for path in home.beside_log.parent.glob(f"{home.beside_log.name}*"):
        path.unlink()
    copy_database(source.querylog, home.beside_log)
    with Database(home.beside_log).writing() as connection:
        for table in OF_HOME:
            connection.execute(delete(table))
