"""The demonstration, phase by phase; flow `demo` says in which order.

Each phase leaves its answers on disk under a name made from the recipe, so an interrupted run continues.
"""

import asyncio
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.progress import TextColumn, track

from infra.client import Answer, Client, LogLevel, Speculation
from infra.files import write_atomic
from infra.keys import operator_key
from infra.machine import git_commit
from infra.priority import free_memory_gib
from infra.registry import open_registry
from infra.service_process import start_service, starting
from infra.settings import Settings
from infra.status import ServiceStatus
from infra.versions import Version
from infra.views.demonstration import show_demonstration
from infra.views.figures import draw_acceptance
from infra.views.results import counting, out, working
from models.recipe import Demo, Recipe
from models.sources import Prompt
from tasks.check_recipe import configure_service
from tasks.measure.cells import PHASES, RESULT, answers_of
from tasks.measure.compare_traffic import compare_acceptance, compare_outputs
from tasks.measure.stock import Stock
from tasks.select_data import as_chats, choose_more, choose_prompts

NUM_EQUALITY = 50
NUM_TIMED = 6
STOCK = "timed-stock"
PLOT_WINDOW = 20
# Of the client beside the refresh: the trainer gives way to the service, and starves beside one that hardly pauses.
PAUSE_S = 25.0
ROOM_GIB = 14.0  # of memory that is free, for vLLM's own endpoint to wait beside the service and what trains

Row = dict[str, Any]


class Stages:
    def __init__(self) -> None:
        self._moments = [("", time.monotonic())]

    def start(self, name: str, said: str = "") -> None:
        """End a stage and announce the next one, by its name or in other words."""
        self._moments.append((name, time.monotonic()))
        out.rule(said or name, align="left")

    @property
    def seconds(self) -> dict[str, float]:
        """How many each stage took that is done."""
        return {name: round(end_s - start_s, 1) for (name, start_s), (_, end_s) in pairwise(self._moments) if name}

    def total_s(self) -> float:
        return round(time.monotonic() - self._moments[0][1], 1)


@contextmanager
def demonstrating(
    recipe: Recipe, demo: Demo, settings: Settings, first: Version, stages: Stages
) -> "Iterator[Demonstration]":
    """Serve the champions while the block runs; ValueError or RuntimeError where the service can't be started.

    vLLM's own endpoint begins beside the service, since each compiles on one core for minutes, and is asked at the end.
    On a GPU, and where there is little memory, it begins then.
    """
    # Answers that another first draft helped with are another run's.
    folder = settings.home / "demo" / f"{recipe.name}-{first.sha256[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    stages.start("serve")
    config = configure_service.fn(recipe)
    with ExitStack() as beside:
        target_dir = Path(config["target_dir"])
        stock = Stock(recipe, settings, target_dir) if demo.stock else None
        if stock is not None and not answers_of(folder, STOCK) and _has_room(settings):
            stock.begin()
            beside.callback(stock.stop)
        with working(starting(config, settings)) as tell:
            service, url = start_service(config, settings, tell)
        try:
            with Client(url, operator_key(settings.home)) as client:
                yield Demonstration(recipe, demo, settings, folder, client, stages, target_dir, stock)
        except KeyboardInterrupt:
            out.print("stopping; run it again to continue from here")
            raise
        finally:
            service.stop()
        beside.pop_all()  # `Demonstration.time_stock` asks it now, and stops it


def _has_room(settings: Settings) -> bool:
    """Return whether another engine can wait beside the service; one takes most of a GPU's memory."""
    return settings.device == "cpu" and free_memory_gib() >= ROOM_GIB


@dataclass
class Demonstration:
    recipe: Recipe
    demo: Demo
    settings: Settings
    folder: Path
    client: Client
    stages: Stages
    target_dir: Path
    stock: Stock | None = None

    @property
    def champion(self) -> int:
        champion = open_registry(self.settings).champion("draft")
        if champion is None:
            raise RuntimeError("the registry has no champion draft after a build")
        return champion.number

    def measure(self, phase: Literal["before", "after"]) -> None:
        """Ask the held-out prompts of both domains as soon as the champion drafts."""
        self.client.wait_for_draft(self.champion, ServiceStatus.drafts_with)
        self.stages.start(f"measure the {'first' if phase == 'before' else 'new'} draft on held-out prompts")
        self._ask(phase, self._held_out())

    def change_traffic(self) -> None:
        """Ask and let the service log the requests of the new domain."""
        self.stages.start(f"traffic changes to {self.demo.new_domain}")
        self._ask("traffic", requests_until(1, self.recipe, self.demo), log="full")

    def send_more(self, window: int, outcome: str) -> None:
        """Go on with requests of the new domain for a window, from 2, in all as many times those of the first one."""
        out.print(f"the refresh ended with: {outcome}; more requests for window {window}")
        self._ask("traffic", requests_until(window, self.recipe, self.demo), log="full")

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        """Let a client go on asking while the block refreshes; then keep what the service says of itself."""
        self.stages.start("refresh while serving")
        stop = threading.Event()
        spare = self._chosen[self.demo.new_domain]["requests"][self.demo.num_requests :]
        client = threading.Thread(target=self._keep_asking, args=(spare, stop), name="client")
        client.start()
        try:
            yield
        finally:
            stop.set()
            client.join()
        (self.folder / "service.json").write_text(self.client.status().model_dump_json())

    def follow(self, outcome: str, candidate: Version | None) -> None:
        """Wait until the service drafts with what a refresh promoted; RuntimeError if that was nothing, or fails."""
        if outcome not in ("promoted", "already trained") or candidate is None:
            raise RuntimeError(f"the refresh ended with: {outcome}; see: redraft status")
        self.client.wait_for_draft(candidate.number, ServiceStatus.drafts_with)

    def time_in_turn(self) -> None:
        """One stream, each prompt once with and once without speculation, the first of the two alternating."""
        self.stages.start("speculation on and off in turn")
        prompts = self._held_out(NUM_TIMED)
        left = {name: self._left(name, prompts) for name in ("timed-on", "timed-off")}
        for number, prompt in enumerate(track(prompts, "timed", console=out)):
            for name in ("timed-on", "timed-off") if number % 2 == 0 else ("timed-off", "timed-on"):
                if prompt in left[name]:
                    self.client.speculate(name == "timed-on")
                    with self._keeper(name) as keep:
                        self._send([prompt], keep, speculation="on")
        self.client.speculate(True)

    def record_reference(self) -> None:
        """Ask some held-out prompts without speculation, with what tells a near-tie."""
        self.client.speculate(False)
        self._ask("reference", self._held_out(NUM_EQUALITY // len(self._domains)), gaps=True)
        self.client.speculate(True)

    def time_stock(self) -> None:
        """Time vLLM's own endpoint, compiled and without a draft, one stream, when the service has ended.

        It is asked what the service was in turn, and is stopped. RuntimeError if it does not start, or a request
        failed.
        """
        prompts = self._held_out(NUM_TIMED)
        left = self._left(STOCK, prompts)
        if self.stock is None or not left:
            return
        self.stages.start("vLLM compiled, without a draft")
        if not self.stock.runs:
            out.print("starting vLLM's own endpoint; its first start on a machine compiles its model for minutes")
        with self.stock as stock, self._keeper(STOCK) as keep:
            stock.ask(prompts[:1])  # the first answer of a server is slow
            for prompt in track(left, "timed", console=out):
                (answer,) = stock.ask([prompt])
                if answer.status != "ok":
                    raise RuntimeError(f"vLLM's own endpoint did not answer prompt {prompt.id}: {answer.status}")
                keep(answer)

    def report(self) -> Row:
        """Show and return the figures, which are also the last line; RuntimeError if a request failed."""
        self.stages.start("result")
        after = self._rows("after")
        sent = [row for name in PHASES for row in self._rows(name)]
        everything = [*sent, *(row for name in ("timed-on", "timed-off", "reference") for row in self._rows(name))]
        plot = draw_acceptance(sent, PLOT_WINDOW, self.folder / "acceptance.png")
        result = {
            "recipe": self.recipe.name,
            "num_draft_tokens": self.recipe.num_draft_tokens,
            "commit": git_commit(),
            "device": f"{self.settings.device}, {platform.machine()}",
            "domains": compare_acceptance(self._rows("before"), after),
            "outputs": compare_outputs(self._rows("reference"), after, self.target_dir),
            "tokens_per_s": {name: self._speed(f"timed-{name}") for name in ("on", "off")},
            "stock": self._against_stock(),
            "requests": dict(Counter(row["status"] for row in everything)),
            "swaps": json.loads((self.folder / "service.json").read_text())["swaps"],
            "training": [
                {name: round(run[name], 1) for name in ("seconds", "num_tokens", "tokens_per_s", "hidden_tokens_per_s")}
                for run in reversed(open_registry(self.settings).store.recorded("distill")[:2])
            ],
            "stage_seconds": self.stages.seconds,
            "seconds": self.stages.total_s(),
        }
        write_atomic(self.folder / RESULT, json.dumps(result) + "\n")
        show_demonstration(result, out)
        out.print(f"plot: {plot}", soft_wrap=True)
        print(json.dumps(result))
        if failed := sum(row["status"] != "ok" for row in everything):
            raise RuntimeError(f"{failed} of {len(everything)} requests failed")
        return result

    def _held_out(self, most: int | None = None) -> list[Prompt]:
        """Return what is measured on, domain by domain, of each `most` at most."""
        of_domains = [self._chosen[domain]["held_out"][: self.demo.held_out_per_domain] for domain in self._domains]
        return [prompt for of_domain in of_domains for prompt in of_domain[:most]]

    @property
    def _domains(self) -> tuple[str, str]:
        return self.demo.first_domain, self.demo.new_domain

    @cached_property
    def _chosen(self) -> dict[str, dict[str, list[Prompt]]]:
        """What is asked, by domain and part; to read the sources takes seconds."""
        traffic, seed = self.recipe.traffic, self.recipe.seed
        return {domain: choose_prompts(domain, traffic[domain], seed) for domain in self._domains}

    def _rows(self, phase: str) -> list[Row]:
        return answers_of(self.folder, phase)

    def _left(self, phase: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        answered = {row["prompt_id"] for row in self._rows(phase)}
        return [prompt for prompt in prompts if prompt.id not in answered]

    @contextmanager
    def _keeper(self, phase: str) -> Iterator[Callable[[Answer], None]]:
        with (self.folder / f"{phase}.jsonl").open("a") as file:

            def keep(answer: Answer) -> None:
                file.write(answer.model_dump_json() + "\n")
                file.flush()

            yield keep

    def _ask(self, phase: str, prompts: Sequence[Prompt], log: LogLevel = "none", gaps: bool = False) -> None:
        """Send what the phase has not sent yet, and keep each answer as it ends."""
        waiting = self._left(phase, prompts)
        with counting(TextColumn("τ {task.fields[tau]}")) as bar, self._keeper(phase) as keep:
            task = bar.add_task(phase, total=len(prompts), completed=len(prompts) - len(waiting), tau="")
            steps = accepted = 0

            def show(answer: Answer) -> None:
                nonlocal steps, accepted
                keep(answer)
                steps += len(answer.accepted_per_step or ())
                accepted += sum(answer.accepted_per_step or ())
                bar.update(task, advance=1, tau=f"{1 + accepted / steps:.2f}" if steps else "")

            self._send(waiting, show, log, self.demo.concurrency, gaps)

    def _keep_asking(self, prompts: Sequence[Prompt], stop: threading.Event) -> None:
        with self._keeper("meanwhile") as keep:
            for prompt in prompts:
                if stop.wait(PAUSE_S):
                    return
                self._send([prompt], keep)

    def _send(
        self,
        prompts: Sequence[Prompt],
        on_answer: Callable[[Answer], None],
        log: LogLevel = "none",
        concurrency: int = 1,
        gaps: bool = False,
        speculation: Speculation = "head",
    ) -> None:
        """Send prompts, drafted head-only unless speed is what is measured."""
        asyncio.run(
            self.client.send(
                as_chats(prompts, self.recipe.traffic),
                concurrency=concurrency,
                max_tokens=self.recipe.generate.max_tokens,
                log=log,
                gaps=gaps,
                speculation=speculation,
                on_answer=on_answer,
            )
        )

    def _speed(self, phase: str) -> dict[str, float]:
        """Tokens/s of one stream by domain, first token excluded; medians would hide that prompts differ."""
        speeds = {}
        for domain in self._domains:
            rows = [row for row in self._rows(phase) if row["domain"] == domain and row["num_tokens"] > 1]
            tokens = sum(row["num_tokens"] - 1 for row in rows)
            speeds[domain] = round(tokens / sum(row["seconds"] - row["first_token_ms"] / 1000 for row in rows), 1)
        return speeds

    def _against_stock(self) -> Row | None:
        """Return vLLM's own endpoint beside the service, on the same prompts; None where it is not wanted."""
        if not self.demo.stock:
            return None
        answers = self._rows(STOCK)
        prompts = {row["prompt_id"] for row in answers}
        references = [row for row in self._rows("reference") if row["prompt_id"] in prompts]
        on, stock = self._speed("timed-on"), self._speed(STOCK)
        return {
            "tokens_per_s": stock,
            "gain": {domain: round(on[domain] / stock[domain], 2) for domain in self._domains},
            "outputs": compare_outputs(references, answers, self.target_dir),
        }


def requests_until(window: int, recipe: Recipe, demo: Demo) -> list[Prompt]:
    """Return the requests of the new domain up to a window, 1 being the first: each has as many.

    The recipe's own come first. Those that are left over are for the client beside the refresh.
    """
    domain, size = demo.new_domain, demo.num_requests
    table = recipe.traffic[domain]
    own = choose_prompts(domain, table, recipe.seed)["requests"]
    if window == 1:
        return own[:size]
    beside = {prompt.id for prompt in own[size:]}
    more = choose_more(domain, table, recipe.seed, "requests", window * size + len(beside))
    return [prompt for prompt in more if prompt.id not in beside][: window * size]
