"""The loop beside two stock vLLM servers: traffic changes, a draft is trained and swapped in, and what may go wrong.

    python -m tests.benchmarks.attach_demo

A home of its own is built from nothing. Two servers of vLLM's with the plugin `redraft_vllm` are served, `redraft
record` stands before the first one, and `redraft up --attach` follows both. Clients ask the recorder, four at a time.
Then a spoiled draft is promoted, the first server is killed, and redraft is. Held-out prompts are asked of a server
directly, and are not logged. Prints a table and one JSON line; ends with 1 where something was not as it should be.
"""

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import torch
from safetensors.torch import load_file, save_file

from infra.artifacts import open_artifact, staged
from infra.client import Answer, Chat, Client
from infra.files import last_lines
from infra.home import SERVED_NAME
from infra.machine import openmp_preload
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import ATTACH_TOKEN, load_settings
from infra.supervisor import read_state
from infra.trigger_store import TriggerStore
from models.core.drafting.draft_families import family_of
from models.core.layers.kernels import engine_dtype
from models.engines.vllm import child_environment
from models.sources import Prompt
from tasks.measure.compare_traffic import compare_acceptance, compare_outputs
from tasks.measure.endpoint import dump
from tasks.measure.run import Run
from tasks.measure.stock import as_flags
from tasks.promote import open_champions
from tasks.select_data import as_chats, choose_prompts
from tests.benchmarks.scripts import PROGRAM, arguments, open_run, show
from tests.imports import ROOT

PLUGIN = ROOT / "models" / "engines" / "vllm" / "redraft_vllm"
EXTENSION = "redraft_vllm.worker.DraftExtension"
NUM_STREAMS, NUM_HELD_OUT, BLOCK = 4, 60, 20
ROLLOUT = ("--set", "serve.rollout.pause_s=1", "--set", "serve.rollout.test_s=60")  # how long the second one waits
BUSY = 0.4  # share of the time in which clients ask: what trains on this machine has the rest
START_S, FOLLOW_S, LEARN_S = 900.0, 120.0, 1800.0
LOOK_S = 0.2


class Server:
    """A stock server that can be killed and started again where it was.

    Attributes:
        url: where.
        seen: versions that it had, in their order.
    """

    def __init__(self, run: Run, site: Path, target: Path, draft: Path, token: str) -> None:
        port = free_port()
        self.url, self.seen = f"http://127.0.0.1:{port}", list[str]()
        self._headers, self._log = {"Authorization": f"Bearer {token}"}, run.folder / f"vllm-{port}.log"
        engine = run.recipe.engine
        flags: dict[str, Any] = {
            "model": str(target),
            "served_model_name": SERVED_NAME,
            "host": "127.0.0.1",
            "port": port,
            "dtype": engine_dtype(engine, run.settings.device),
            "enforce_eager": True,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": 16,
            "per_request_spec_decode_metrics": "detailed",
            "worker_extension_cls": EXTENSION,
            "speculative_config": {
                **family_of(draft).vllm_config(draft),
                "num_speculative_tokens": run.recipe.num_draft_tokens,
            },
        }
        self._argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *as_flags(flags)]
        self._environment = {**child_environment(), **openmp_preload(), "PYTHONPATH": str(site), ATTACH_TOKEN: token}
        self._environment |= {"VLLM_PLUGINS": "redraft,redraft_notice", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self._child: Child | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._child = Child.start(self._argv, self._environment, self._log, f"vLLM's server at {self.url}")
        wait_until(lambda: answers(f"{self.url}/health"), START_S, self._child, f"{self.url}/health")

    def kill(self) -> None:
        """End it as kill -9 does."""
        if self._child is not None:
            self._child.stop(grace_s=0)

    def version(self) -> str:
        """Return the version that it drafts with now, "" while it is away."""
        try:
            told = httpx.get(f"{self.url}/redraft/draft", headers=self._headers, timeout=5, trust_env=False)
            version = str(told.raise_for_status().json()["version"])
        except (httpx.HTTPError, ValueError, KeyError):
            return ""
        if version not in self.seen[-1:]:
            self.seen.append(version)
        return version


class Traffic:
    """Clients who go on asking the recorder, with consent, until they are told to stop.

    Attributes:
        statuses: how their requests ended.
    """

    def __init__(self, url: str, chats: list[Chat], max_tokens: int) -> None:
        self.statuses: list[str] = []
        self._url, self._chats, self._max_tokens = url, chats, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        at = 0
        while not self._stop.is_set():
            block = [self._chats[(at + place) % len(self._chats)] for place in range(BLOCK)]
            began_s = time.monotonic()
            self.statuses += [one.status for one in send(self._url, block, self._max_tokens, log=True)]
            at += BLOCK
            self._stop.wait((time.monotonic() - began_s) * (1 / BUSY - 1))


def send(url: str, chats: list[Chat], max_tokens: int, log: bool = False, gaps: bool = False) -> list[Answer]:
    """Ask chats, four at a time."""
    with Client(url, operates=False) as client:
        level: Any = "full" if log else "none"
        sending = client.send(chats, concurrency=NUM_STREAMS, max_tokens=max_tokens, log=level, gaps=gaps)
        return asyncio.run(sending)


class Demonstration:
    """Two servers and redraft beside them; each method is a phase."""

    def __init__(self, run: Run, servers: tuple[Server, Server], recorder: str) -> None:
        self.run, self.first, self.second, self.recorder = run, *servers, recorder
        settings = load_settings()
        self.settings, self.registry, self.trigger = settings, open_registry(settings), TriggerStore(settings.querylog)
        self.target = open_champions.fn().target_files.path
        self.champion = self._champion()
        if run.recipe.demo is None:
            raise ValueError(f"recipe {run.recipe.name} has no table [demo], which says how traffic changes")
        self.old, self.new = run.recipe.demo.first_domain, run.recipe.demo.new_domain
        self.prompts = {name: choose_prompts(name, of, run.recipe.seed) for name, of in run.recipe.traffic.items()}

    def held_out(self, server: Server) -> list[dict[str, Any]]:
        """Ask a server the held-out prompts of both domains."""
        prompts = [one for name in (self.old, self.new) for one in self.prompts[name]["held_out"][:NUM_HELD_OUT]]
        found = send(server.url, self._chats(prompts), self.run.recipe.generate.max_tokens, gaps=True)
        if failed := [one.status for one in found if one.status != "ok"]:
            raise RuntimeError(f"{len(failed)} held-out prompts failed, the first with {failed[0]}")
        return dump(found)

    def learn(self) -> dict[str, Any]:
        """Let the traffic change until both servers draft with what was learnt from it."""
        recipe, events = self.run.recipe, dict[str, float]()
        with self._traffic(self.old) as traffic:
            self._wait(
                lambda: len(traffic.statuses) >= recipe.traffic[self.old].num_requests,
                LEARN_S,
                f"requests of {self.old}",
            )
        statuses = traffic.statuses
        began_s, old = time.monotonic(), self.champion
        with self._traffic(self.new) as traffic:

            def has(name: str, holds: bool) -> bool:
                if holds:
                    events.setdefault(name, round(time.monotonic() - began_s, 1))
                return holds

            def learnt() -> bool:
                has("told", self.new in self.trigger.state().domains)
                new = self._champion()
                has("promoted", new != old)
                later = self.second.version()  # asked before the first one, which must have had it by then
                return has("first server", self.first.version() == str(new) != str(old)) and has(
                    "second server", later == str(new)
                )

            self._wait(learnt, LEARN_S, "a new draft on both servers")
        self.champion = self._champion()
        statuses += traffic.statuses
        failed = sum(status != "ok" for status in statuses)
        return {"requests": len(statuses), "failed": failed, "rows": self._rows(), "seconds": events}

    def spoil(self) -> dict[str, Any]:
        """Promote a draft whose weights are noise, under the champion's promises, while clients ask."""
        files, lineage = (
            open_artifact(open_champions.fn().draft_files),
            self.registry.get("draft", self.champion).lineage,
        )
        with staged(self.run.folder / "spoiled") as directory:
            shutil.copytree(files, directory, dirs_exist_ok=True)
            (directory / "manifest.json").unlink()
            weights, rng = load_file(directory / "model.safetensors"), torch.Generator().manual_seed(0)
            for name, one in weights.items():
                if one.is_floating_point() and one.ndim > 1:
                    weights[name] = (torch.randn(one.shape, generator=rng) * one.float().std()).to(one.dtype)
            save_file(weights, directory / "model.safetensors")
        liar = self.registry.register("draft", self.run.folder / "spoiled", lineage.to_tags()).number
        with self._traffic(self.new) as traffic:
            self.registry.promote("draft", liar)

            def taken_back() -> bool:
                second, first = self.second.version(), self.first.version()
                refused = self.registry.get("draft", liar).quarantined
                return bool(refused) and first == second == str(self.champion)

            self._wait(taken_back, FOLLOW_S, "the last good draft")
        failed = sum(status != "ok" for status in traffic.statuses)
        self.registry.promote("draft", self.champion)
        return {
            "why": self.registry.get("draft", liar).quarantined,
            "on the first server": str(liar) in self.first.seen,
            "on the second server": str(liar) in self.second.seen,
            "requests": len(traffic.statuses),
            "failed": failed,
        }

    def kill_server(self) -> float:
        """Kill the first server; return the seconds from its start until it has the champion again."""
        self.first.kill()
        self.first.seen.clear()
        self.first.start()
        began_s = time.monotonic()
        self._wait(lambda: self.first.version() == str(self.champion), FOLLOW_S, "the champion again")
        return round(time.monotonic() - began_s, 1)

    def kill_redraft(self) -> dict[str, int]:
        """Kill all that `redraft up` runs; return how requests through the recorder end."""
        state = read_state(self.settings.home)
        if state is None:
            raise RuntimeError("redraft is not up")
        os.kill(state.pid, signal.SIGKILL)
        self._wait(lambda: read_state(self.settings.home) is None, FOLLOW_S, "nothing of redraft")
        before = self._rows()
        chats = self._chats(self.prompts[self.new]["requests"][:BLOCK])
        found = send(self.recorder, chats, self.run.recipe.generate.max_tokens, log=True)
        self._wait(lambda: self._rows() >= before + BLOCK, FOLLOW_S, "their rows")
        return {"requests": len(found), "failed": sum(one.status != "ok" for one in found)}

    def _traffic(self, domain: str) -> Traffic:
        chats = self._chats(self.prompts[domain]["requests"])
        return Traffic(self.recorder, chats, self.run.recipe.generate.max_tokens)

    def _chats(self, prompts: list[Prompt]) -> list[Chat]:
        return as_chats(prompts, self.run.recipe.traffic)

    def _champion(self) -> int:
        champion = self.registry.champion("draft")
        if champion is None:
            raise RuntimeError("the registry has no champion draft after a build")
        return champion.number

    def _rows(self) -> int:
        log = QueryLog(self.settings.querylog)
        try:
            return log.last_seq()
        finally:
            log.close()

    def _wait(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        until_s = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > until_s:
                raise TimeoutError(f"waited {timeout_s:g} s for {what}")
            time.sleep(LOOK_S)


def plugin(folder: Path) -> Path:
    """Install the plugin as `pip install` does, into a folder of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    source = shutil.copytree(PLUGIN, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(folder / "site"), str(source)], check=True)
    return folder / "site"


@contextmanager
def running(run: Run, token: str) -> Iterator[Demonstration]:
    """Run two servers, the recorder before the first one, and redraft beside them."""
    pair, site, port = open_champions.fn(), plugin(run.folder / "plugin"), free_port()
    settings = load_settings()
    draft = open_artifact(pair.draft_files)
    servers = tuple(Server(run, site, pair.target_files.path, draft, token) for _ in range(2))
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        recorded = f"http://127.0.0.1:{port}"
        named = ["--recipe", run.recipe_name]
        record = [*PROGRAM, "record", servers[0].url, "--port", str(port), "--model", SERVED_NAME, *named]
        told = {ATTACH_TOKEN: token}
        recorder = stack.enter_context(Child.start(record, told, settings.home / "logs" / "recording.log", "record"))
        wait_until(lambda: answers(f"{recorded}/redraft/healthz"), START_S, recorder, "the recorder")
        up = [*PROGRAM, "up", "--attach", servers[0].url, "--attach", servers[1].url, *named, *ROLLOUT]
        subprocess.run(up, env={**os.environ, **told}, check=True)
        stack.callback(_down, run)
        yield Demonstration(run, (servers[0], servers[1]), recorded)


def _down(run: Run) -> None:
    if read_state(load_settings().home) is not None:
        subprocess.run([*PROGRAM, "down"], check=True)


def demonstrate(run: Run) -> dict[str, Any]:
    """Run all phases, and return what came of them."""
    shutil.rmtree(load_settings().home, ignore_errors=True)
    found: dict[str, Any] = {}
    began_s = time.monotonic()

    def phase(name: str, said: Any) -> Any:
        print(f"{time.monotonic() - began_s:6.0f} s  {name}: {said}", flush=True)
        return said

    log = run.folder / "build.log"
    with log.open("wb") as told:
        build = subprocess.run([*PROGRAM, "build", "--recipe", run.recipe_name], stdout=told, stderr=told, check=False)
    if build.returncode:
        raise RuntimeError("the build failed\n" + "\n".join(last_lines(log, 20)))
    with running(run, secrets.token_hex(16)) as shown:
        phase("two servers, a recorder, redraft", f"draft {shown.champion}")
        before = shown.held_out(shown.first)
        found["learnt"] = phase("the traffic changed", shown.learn())
        after, other = shown.held_out(shown.first), shown.held_out(shown.second)
        compared = compare_acceptance(before, after)
        found["tau"] = {name: [_tau(one["before"]), _tau(one["after"])] for name, one in compared.items()}
        found["gain"] = {
            name: [round(one["gain"][end], 3) for end in ("value", "low")] for name, one in compared.items()
        }
        found["tau"] = phase("τ on held-out prompts", found["tau"])
        found["outputs"] = phase("outputs", compare_outputs(before, after, shown.target)["verdicts"])
        found["tau of the second server"] = {
            name: _tau(one["after"]) for name, one in compare_acceptance(before, other).items()
        }
        found["spoiled"] = phase("a spoiled draft", shown.spoil())
        found["server killed"] = phase("a killed server has the champion again, s", shown.kill_server())
        found["redraft killed"] = phase("redraft killed", shown.kill_redraft())
        found["wrong"] = wrong(found, shown.old, shown.new)
    return found


def _tau(summary: Mapping[str, Any]) -> float:
    return round(float(summary["tau"]["value"]), 3)


def wrong(found: dict[str, Any], old: str, new: str) -> list[str]:
    """Return what is not as it should be, where the traffic changed from one domain to another."""
    tau, spoiled = found["tau"], found["spoiled"]
    failed = found["learnt"]["failed"] + spoiled["failed"] + found["redraft killed"]["failed"]
    checks = {
        f"{new} gained less than 0.4 of τ": tau[new][1] - tau[new][0] < 0.4,
        f"{old} moved by more than 3%": abs(tau[old][1] / tau[old][0] - 1) > 0.03,
        f"{failed} requests failed": failed > 0,
        "outputs differ": "different" in found["outputs"],
        "the spoiled draft was refused without a trial on the first server": not spoiled["on the first server"],
    }
    return [text for text, is_wrong in checks.items() if is_wrong]


def main() -> int:
    """Run the demonstration."""
    given: argparse.Namespace = arguments("The loop beside stock vLLM servers.").parse_args()
    run = open_run("attach-demo", given)
    found = demonstrate(run)
    rows = [[name, f"{old:.3f}", f"{new:.3f}"] for name, (old, new) in found["tau"].items()]
    show({**run.setup, **found}, "τ on held-out prompts", ["domain", "before", "after"], rows)
    for text in found["wrong"]:
        print(text, file=sys.stderr)
    return int(bool(found["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
