"""How long a workload that no draft has learnt waits for its own draft under `redraft up`, with nothing set.

    python -m tests.benchmarks.new_workload FILE.jsonl --domain wikisql

The home of `REDRAFT_HOME` must be built, and is changed: run it on a copy. `redraft up` is started unless it runs, and
ended again. The file's chats are asked over HTTP with the domain's name and consent to be logged, a fixed number at a
time and with rests, until the service drafts with a draft that was promoted since; at each answer it is looked what has
happened. τ
(of the draft alone, K tokens a step) and the speed of drafting on ÷ off, asked in turn at one stream, are measured
before and after on prompts of the file's end, which are not logged. What was done is kept in OUTPUT and not done
again: seconds count only while requests are sent. Prints one JSON line at the end.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from infra.client import Answer, Chat, Client, Speculation
from infra.keys import operator_key
from infra.machine import describe_machine
from infra.registry import open_registry
from infra.settings import Settings, load_settings
from infra.status import ServiceStatus
from infra.supervisor import read_state
from infra.trigger_store import TriggerStore
from infra.triggers import Due, Fallen, Running
from models.core.evaluation.latency import Decoded, compare_blocks

STATES = {"low": (Fallen, Due, Running), "asked": (Due, Running), "started": (Running,)}


def chats(file: Path, domain: str) -> list[Chat]:
    """Return the file's chats."""
    lines = (json.loads(line) for line in file.read_text().splitlines())
    return [Chat(line["id"], domain, line["messages"]) for line in lines]


def quality(client: Client, fresh: list[Chat], max_tokens: int) -> dict[str, Any]:
    """Return τ of the draft alone, and the speed of drafting on ÷ off."""

    def ask(chat: Chat, speculation: Speculation) -> Answer:
        sending = client.send([chat], concurrency=1, max_tokens=max_tokens, log="none", speculation=speculation)
        (answer,) = asyncio.run(sending)
        if answer.status != "ok":
            raise RuntimeError(f"chat {chat.id} ended with {answer.status}")
        return answer

    alone, blocks = [], []
    for number, chat in enumerate(tqdm(fresh, "fresh prompts", mininterval=5)):
        alone.append(ask(chat, "head"))
        ways: list[Speculation] = ["on", "off"] if number % 2 == 0 else ["off", "on"]
        found = {way: ask(chat, way) for way in ways}
        on, off = ({chat.id: Decoded(found[way].num_tokens, found[way].seconds)} for way in ("on", "off"))
        blocks.append((on, off))
    ratio = compare_blocks(blocks)
    tau = 1 + sum(one.num_accepted for one in alone) / max(sum(one.num_steps for one in alone), 1)
    return {"tau": round(tau, 3), "on_off": [round(one, 3) for one in (ratio.value, ratio.low, ratio.high)]}


class Stream:
    """Asks the workload's chats until the service drafts with another draft."""

    def __init__(self, settings: Settings, client: Client, kept: dict[str, Any], given: argparse.Namespace) -> None:
        self.client, self.kept, self.given = client, kept, given
        self.registry, self.trigger = open_registry(settings), TriggerStore(settings.querylog)
        self.looked_s = 0.0
        self.bar = tqdm(total=given.most, desc="requests", initial=kept["requests"], mininterval=5)

    def run(self, asked: list[Chat]) -> None:
        """Ask, in blocks of which each is kept."""
        while "swapped" not in self.kept["events"] and self.kept["requests"] < self.given.most:
            first = self.kept["requests"]
            block = [asked[place % len(asked)] for place in range(first, first + 10 * self.given.streams)]
            began_s, before_s = time.monotonic(), self.kept["seconds"]

            def tell(answer: Answer, began_s: float = began_s, before_s: float = before_s) -> None:
                self.kept["requests"] += 1
                self.kept["failed"] += answer.status != "ok"
                self.kept["seconds"] = round(before_s + time.monotonic() - began_s, 1)
                self.bar.update()
                self.look()

            sending = self.client.send(
                block, concurrency=self.given.streams, max_tokens=self.given.tokens, on_answer=tell
            )
            asyncio.run(sending)
            rest_s = (time.monotonic() - began_s) * (1 / self.given.busy - 1)
            time.sleep(rest_s)
            self.kept["seconds"] = round(self.kept["seconds"] + rest_s, 1)
            keep(self.given.output, self.kept)
        self.bar.close()

    def look(self) -> None:
        """Note what has happened, once a second at most."""
        if time.monotonic() - self.looked_s < 1:
            return
        self.looked_s = time.monotonic()
        seen = self.trigger.state().domains.get(self.given.domain)
        happened = [name for name, states in STATES.items() if isinstance(seen, states)]
        champion = self.registry.champion("draft")
        if champion is not None and champion.number != self.kept["draft"]:
            happened.append("promoted")
            if ServiceStatus.drafts_with(self.client.status(), champion.number):
                happened.append("swapped")
        for name in happened:
            if name not in self.kept["events"]:
                self.kept["events"][name] = {"seconds": self.kept["seconds"], "requests": self.kept["requests"]}
                self.bar.write(f"{name}: {self.kept['events'][name]}")


def keep(output: Path, kept: dict[str, Any]) -> None:
    """Write what was done so far."""
    new = output.with_suffix(".new")
    new.write_text(json.dumps(kept))
    new.replace(output)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Send a new workload, and see how long its draft takes.")
    parser.add_argument("file", type=Path, help="chats, a JSON object with id and messages a line")
    parser.add_argument("--domain", required=True, help="its name")
    parser.add_argument("--recipe", default="smollm2-cpu")
    parser.add_argument("--output", type=Path, default=Path("new-workload.json"))
    parser.add_argument("--streams", type=int, default=2, help="requests in flight")
    parser.add_argument("--busy", type=float, default=0.5, help="share of the time in which requests are in flight")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--fresh", type=int, default=40, help="prompts that are measured before and after")
    parser.add_argument("--most", type=int, default=2000, help="requests after which it gives up")
    given, settings = parser.parse_args(), load_settings()
    command = [str(Path(sys.executable).with_name("redraft"))]
    started = read_state(settings.home) is None
    if started:
        subprocess.run([*command, "up", "--recipe", given.recipe], check=True)
    try:
        state = read_state(settings.home)
        champion = open_registry(settings).champion("draft")
        if state is None or champion is None:
            raise RuntimeError("nothing was built, or redraft up ended at once")
        kept = {"draft": champion.number, "requests": 0, "failed": 0, "seconds": 0.0, "events": {}}
        if given.output.exists():
            kept = json.loads(given.output.read_text())
        all_chats = chats(given.file, given.domain)
        asked, fresh = all_chats[: -given.fresh], all_chats[-given.fresh :]
        with Client(state.url("service"), operator_key(settings.home)) as client:
            if "before" not in kept:
                kept["before"] = quality(client, fresh, given.tokens)
                keep(given.output, kept)
            Stream(settings, client, kept, given).run(asked)
            if "swapped" in kept["events"] and "after" not in kept:
                kept["after"] = quality(client, fresh, given.tokens)
                keep(given.output, kept)
    finally:
        if started:
            subprocess.run([*command, "down"], check=True)
    print(json.dumps({**describe_machine(), "domain": given.domain, "recipe": given.recipe, **kept}))


if __name__ == "__main__":
    main()
