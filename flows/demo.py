"""The demonstration: traffic changes, the draft falls behind, learns from the log, and is replaced while it serves.

Each phase leaves its answers on disk under a name made from the recipe, so an interrupted run goes on where it was.
"""

import asyncio
import json
import platform
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from rich.table import Table

from flows.build import build
from flows.refresh import refresh
from flows.report import DEMO_PHASES, DEMO_RESULT, answers_of
from flows.serving import SERVED_NAME, start_service
from flows.traffic import Answer, send
from infra.artifacts import write_whole
from infra.registry import Registry, Version
from infra.settings import Settings
from tasks.compare_traffic import DomainComparison, Outputs, compare_acceptance, compare_outputs
from tasks.figures import draw_acceptance
from tasks.lineage import git_commit
from tasks.recipe import Recipe
from tasks.select_data import Prompt, choose_prompts

NUM_EQUALITY = 50
NUM_TIMED = 6
SWAP_TIMEOUT_S = 180.0
PLOT_WINDOW = 20
out = Console()
Row = dict[str, Any]


def demo(recipe: Recipe, settings: Settings) -> Row:
    """Run the demonstration and return the figures that it prints as its last line.

    Raises:
        ValueError: the recipe has no [demo], or can't be built or served.
        RuntimeError: a request failed, or the service did not take the new draft.
    """
    if recipe.demo is None:
        raise ValueError(f"recipe {recipe.name} has no table [demo]")
    started_s = time.monotonic()
    out.rule("build: target, answers, first draft", align="left")
    first = build(recipe)
    run = _Run(recipe, settings, first)
    run.seconds["build"] = round(time.monotonic() - started_s, 1)
    run.stage("serve")
    service, run.url = start_service(recipe, settings)
    try:
        run.demonstrate(first.number)
    except KeyboardInterrupt:
        out.print("stopping; the next run goes on from here")
        raise
    finally:
        service.stop()
    return run.report(time.monotonic() - started_s)


class _Run:
    def __init__(self, recipe: Recipe, settings: Settings, first: Version) -> None:
        assert recipe.demo is not None
        self.recipe, self.demo, self.settings = recipe, recipe.demo, settings
        # Answers that another first draft helped with are another run's.
        self.folder = settings.home / "demo" / f"{recipe.name}-{first.sha256[:12]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.url = ""
        self.seconds: dict[str, float] = {}
        self._stage: tuple[str, float] | None = None

    def stage(self, name: str) -> None:
        """Announce a stage, and time the one before it."""
        now = time.monotonic()
        if self._stage is not None:
            self.seconds[self._stage[0]] = round(now - self._stage[1], 1)
        self._stage = (name, now)
        out.rule(name, align="left")

    def demonstrate(self, first_number: int) -> None:
        demo, held_out = self.demo, {}
        for domain in (demo.first_domain, demo.new_domain):
            held_out[domain] = self.prompts(domain, "held_out")[: demo.held_out_per_domain]
        both = [prompt for prompts in held_out.values() for prompt in prompts]
        champion = self.champion()
        if champion == first_number:
            self.wait_for_draft(first_number)
            self.stage("measure the first draft on held-out prompts")
            self.ask("before", both)
            self.stage(f"traffic changes to {demo.new_domain}")
            self.ask("traffic", self.prompts(demo.new_domain, "requests")[: demo.num_requests], log="full")
            self.stage("refresh while serving")
            self.refresh()
        self.wait_for_draft(self.champion())
        self.stage("measure the new draft on held-out prompts")
        self.ask("after", both)
        self.stage("speculation on and off in turn")
        self.time_in_turn([prompt for prompts in held_out.values() for prompt in prompts[:NUM_TIMED]])
        equality = [prompt for prompts in held_out.values() for prompt in prompts[: NUM_EQUALITY // len(held_out)]]
        self.speculate(False)
        self.ask("reference", equality, gaps=True)
        self.speculate(True)

    def prompts(self, domain: str, part: str) -> list[Prompt]:
        return choose_prompts(domain, self.recipe.traffic[domain], self.recipe.seed)[part]

    def champion(self) -> int:
        champion = Registry(self.settings.mlflow_uri, self.settings.artifacts / "mlflow").champion("draft")
        if champion is None:
            raise RuntimeError("the registry has no champion draft after a build")
        return champion.number

    def rows(self, name: str) -> list[Row]:
        """Return a phase's answers, in the order they ended; one that a kill cut short is not there."""
        return answers_of(self.folder / f"{name}.jsonl")

    def ask(
        self, name: str, prompts: Sequence[Prompt], *, log: str = "none", concurrency: int = 0, gaps: bool = False
    ) -> None:
        """Send what the phase has not sent yet, and keep each answer as it ends."""
        answered = {row["prompt_id"] for row in self.rows(name)}
        waiting = [prompt for prompt in prompts if prompt.id not in answered]
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("τ {task.fields[tau]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=out) as bar, (self.folder / f"{name}.jsonl").open("a") as file:
            task = bar.add_task(name, total=len(prompts), completed=len(prompts) - len(waiting), tau="")
            steps = accepted = 0

            def keep(answer: Answer) -> None:
                nonlocal steps, accepted
                file.write(answer.model_dump_json() + "\n")
                file.flush()
                steps += len(answer.accepted_per_step or ())
                accepted += sum(answer.accepted_per_step or ())
                bar.update(task, advance=1, tau=f"{1 + accepted / steps:.2f}" if steps else "")

            asyncio.run(self._send(waiting, keep, log, concurrency or self.demo.concurrency, gaps))

    async def _send(self, prompts: Sequence[Prompt], keep: Any, log: Any, concurrency: int, gaps: bool) -> list[Answer]:
        return await send(
            prompts,
            self.url,
            concurrency=concurrency,
            max_tokens=self.recipe.generate.max_tokens,
            log=log,
            model=SERVED_NAME,
            api_key=self.settings.api_keys[0] if self.settings.api_keys else None,
            gaps=gaps,
            on_answer=keep,
        )

    def refresh(self) -> None:
        """Retrain beside a client that goes on asking, until the service has taken the new draft."""
        used = self.demo.num_requests
        spare = self.prompts(self.demo.new_domain, "requests")[used:]
        with _Client(self, spare):
            outcome, candidate = refresh(self.recipe)
            if outcome not in ("promoted", "already trained") or candidate is None:
                raise RuntimeError(f"the refresh ended with: {outcome}; redraft status says why")
            self.wait_for_draft(candidate.number)
        (self.folder / "service.json").write_text(json.dumps(self.status()))

    def wait_for_draft(self, number: int) -> None:
        until = time.monotonic() + SWAP_TIMEOUT_S
        while str((status := self.status())["draft_version"]) != str(number):
            if time.monotonic() > until:
                raise RuntimeError(
                    f"the service still drafts with {status['draft_version']}, not with {number}: "
                    f"{status['refused'] | status['postponed']}"
                )
            time.sleep(0.5)

    def status(self) -> Row:
        answer: Row = httpx.get(
            f"{self.url}/redraft/status", headers=self._headers(), timeout=10, trust_env=False
        ).json()
        return answer

    def speculate(self, on: bool) -> None:
        address = f"{self.url}/redraft/speculation"
        httpx.post(address, json={"on": on}, headers=self._headers(), timeout=60, trust_env=False).raise_for_status()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.settings.api_keys[0]}"} if self.settings.api_keys else {}

    def time_in_turn(self, prompts: Sequence[Prompt]) -> None:
        """One stream, each prompt once with and once without speculation, the first of the two alternating."""
        answered = {name: {row["prompt_id"] for row in self.rows(name)} for name in ("timed-on", "timed-off")}
        for number, prompt in enumerate(track(prompts, "timed", console=out)):
            for name in ("timed-on", "timed-off") if number % 2 == 0 else ("timed-off", "timed-on"):
                if prompt.id not in answered[name]:
                    self.speculate(name == "timed-on")
                    with (self.folder / f"{name}.jsonl").open("a") as file:
                        asyncio.run(
                            self._send(
                                [prompt], lambda answer: file.write(answer.model_dump_json() + "\n"), "none", 1, False
                            )
                        )
        self.speculate(True)

    def report(self, seconds: float) -> Row:
        self.stage("result")
        before, after = self.rows("before"), self.rows("after")
        comparisons = compare_acceptance(before, after)
        registry = Registry(self.settings.mlflow_uri, self.settings.artifacts / "mlflow")
        champion = registry.champion("target")
        assert champion is not None
        outputs = compare_outputs(self.rows("reference"), after, registry.download(champion, self.settings.cache))
        sent = [row for name in DEMO_PHASES for row in self.rows(name)]
        everything = [*sent, *(row for name in ("timed-on", "timed-off", "reference") for row in self.rows(name))]
        swap_at = len([row for row in sent if row["draft_version"] == sent[0]["draft_version"]])
        plot = draw_acceptance(sent, swap_at, PLOT_WINDOW, self.folder / "acceptance.png")
        status = json.loads((self.folder / "service.json").read_text())
        result = {
            "recipe": self.recipe.name,
            "num_draft_tokens": self.recipe.num_draft_tokens,
            "commit": git_commit(),
            "device": f"{self.settings.device}, {platform.machine()}",
            "domains": {domain: comparison.model_dump(mode="json") for domain, comparison in comparisons.items()},
            "outputs": outputs.model_dump(),
            "tokens_per_s": {name: self._speed(f"timed-{name}") for name in ("on", "off")},
            "requests": dict(Counter(row["status"] for row in everything)),
            "swaps": status["swaps"],
            "training": [
                {name: round(run[name], 1) for name in ("seconds", "num_tokens", "tokens_per_s", "hidden_tokens_per_s")}
                for run in reversed(registry.store.recorded("distill")[:2])
            ],
            "stage_seconds": self.seconds,
            "seconds": round(seconds, 1),
        }
        write_whole(self.folder / DEMO_RESULT, json.dumps(result) + "\n")
        _show(result, comparisons, outputs)
        out.print(f"plot: {plot}", soft_wrap=True)
        print(json.dumps(result))
        failed = sum(row["status"] != "ok" for row in everything)
        if failed:
            raise RuntimeError(f"{failed} of {len(everything)} requests failed")
        return result

    def _speed(self, name: str) -> dict[str, float]:
        """Tokens/s of one stream by domain, first token excluded; medians would hide that prompts differ."""
        speeds = {}
        for domain in (self.demo.first_domain, self.demo.new_domain):
            rows = [row for row in self.rows(name) if row["domain"] == domain and row["num_tokens"] > 1]
            tokens = sum(row["num_tokens"] - 1 for row in rows)
            speeds[domain] = round(tokens / sum(row["seconds"] - row["first_token_ms"] / 1000 for row in rows), 1)
        return speeds


class _Client:
    """A client in a thread that asks one prompt after another until the block ends."""

    PAUSE_S = 25.0  # the trainer gives way to the service: beside a client that hardly pauses it would starve

    def __init__(self, run: _Run, prompts: Sequence[Prompt]) -> None:
        self._run, self._prompts = run, prompts
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="client")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with (self._run.folder / "meanwhile.jsonl").open("a") as file:

            def keep(answer: Answer) -> None:
                file.write(answer.model_dump_json() + "\n")
                file.flush()

            for prompt in self._prompts:
                if self._stop.wait(self.PAUSE_S):
                    return
                asyncio.run(self._run._send([prompt], keep, "none", 1, False))


def _show(result: Row, comparisons: dict[str, DomainComparison], outputs: Outputs) -> None:
    table = Table("", *comparisons, title=f"held-out prompts, K = {result['num_draft_tokens']}, greedy")
    rows = {
        "prompts": lambda c: f"{c.after.num_sequences}",
        "τ before": lambda c: _estimate(c.before.tau),
        "τ after": lambda c: _estimate(c.after.tau),
        "τ gain": lambda c: _estimate(c.gain, "+"),
        "τ gain, relative": lambda c: _estimate(c.relative_gain, "+.1%"),
        "acceptance rate before": lambda c: _estimate(c.before.rate),
        "acceptance rate after": lambda c: _estimate(c.after.rate),
        "looping outputs, before and after": lambda c: f"{c.before.num_looping} and {c.after.num_looping}",
        "τ before, without loops": lambda c: _estimate(c.before.tau_without_loops),
        "τ after, without loops": lambda c: _estimate(c.after.tau_without_loops),
        "acceptance rate before, without loops": lambda c: _estimate(c.before.rate_without_loops),
        "acceptance rate after, without loops": lambda c: _estimate(c.after.rate_without_loops),
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(comparison) for comparison in comparisons.values()))
    for name in ("on", "off"):
        table.add_row(f"tokens/s, speculation {name}", *(str(result["tokens_per_s"][name][d]) for d in comparisons))
    out.print(table)
    out.print(f"outputs of {outputs.num_compared} prompts after the swap against no speculation: {outputs.verdicts}")
    for name, run in zip(("first", "new"), result["training"], strict=False):
        out.print(f"training of the {name} draft: {run['seconds']:.0f} s, {run['tokens_per_s']:.0f} tokens/s")
    out.print(f"requests: {result['requests']}, swaps: {result['swaps']}, seconds: {result['seconds']}")


def _estimate(estimate: Any, form: str = "") -> str:
    if estimate is None:
        return "none"
    form = form if "%" in form else f"{form}.2f"
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"
