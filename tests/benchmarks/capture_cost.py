"""What capturing hidden states while serving costs a stream, and what it saves the next refresh.

    python -m tests.benchmarks.capture_cost TARGET DRAFT

Asks held-out prompts of recipe `smollm2-cpu` in one engine, in process, greedily and by the head alone at K, so that
each block makes the same steps. Blocks with and without capture take turns; with it each answer is claimed when it
ends, and its file written, as the service does. Then the answers' states are extracted twice, without and with the
files, as training does. Prints a line for each, and one JSON line at the end.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from infra.machine import openmp_preload
from infra.querylog import CapturedFiles
from models.core.learning.captured import Captures
from models.core.learning.hidden import HiddenStates, Sample
from models.engines import Completion
from models.engines import vllm as served
from models.engines.vllm.capture import Claim
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.targets import describe
from tests.benchmarks.drafting_speed import held_out

NUM_TOKENS = 64
MEMORY = 1 << 28


class Asker:
    """Asks prompts in blocks; keeps the answers that were captured."""

    def __init__(self, engine: VllmEngine, files: CapturedFiles, target: str) -> None:
        self.captured: list[Completion] = []
        self._engine, self._files, self._target = engine, files, target
        self._claims: set[asyncio.Task[Any]] = set()
        engine.llm.on_finish = self._finished

    async def block(self, prompts: Sequence[list[int]], streams: int, capture: bool) -> float:
        """Return tokens/s of all streams together."""
        gate, begun, num_tokens = asyncio.Semaphore(streams), time.monotonic(), 0

        async def one(number: int, prompt: list[int]) -> None:
            nonlocal num_tokens
            name = f"{begun}-{number}"
            draft_options = DraftOptions("head", "chat", capture=name if capture else "")
            sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0)
            async with gate:
                async for output in self._engine.llm.generate(
                    {"prompt_token_ids": prompt}, sampling, name, draft_options
                ):
                    last = output
            num_tokens += len(last.outputs[0].token_ids)

        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        speed = num_tokens / (time.monotonic() - begun)
        await asyncio.gather(*self._claims)
        return speed

    def _finished(self, completion: Completion, sampling: SamplingParams) -> None:
        if DraftOptions.of(sampling).capture:
            self.captured.append(completion)
            file = str(self._files.path_of(completion.request_id))
            num_tokens = len(completion.prompt_ids) + len(completion.token_ids)
            claim = Claim(completion.request_id, file, num_tokens, self._target)
            task = asyncio.get_running_loop().create_task(self._engine.settle_states([claim]))
            self._claims.add(task)
            task.add_done_callback(self._claims.discard)


async def serve(
    target: Path, draft: Path, files: CapturedFiles, given: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[Completion], dict[str, int]]:
    """Return a row for each number of streams, the captured answers, and what became of their states."""
    params = served.Params(enforce_eager=given.eager, max_num_seqs=64, lookup=served.LookUp(num_tokens=0))
    engine = await VllmEngine.start(target, draft, params, draft_version="1")
    try:
        await engine.capture_states(MEMORY)
        asker, rows = Asker(engine, files, describe(target).sha256), []
        prompts = [prompt for of_domain in held_out(target, given.prompts).values() for prompt in of_domain]
        for streams in given.streams:
            await asker.block(prompts, streams, capture=False)
            pairs = []
            for number in range(given.rounds):
                order = (True, False) if number % 2 else (False, True)
                speeds = {capture: await asker.block(prompts, streams, capture) for capture in order}
                pairs.append((speeds[True], speeds[False]))
                print(streams, *(f"{speed:.2f}" for speed in pairs[-1]), flush=True)
            ratios = [with_it / without for with_it, without in pairs]
            mean, error = statistics.mean(ratios), statistics.stdev(ratios) / len(ratios) ** 0.5
            row = {"streams": streams, "with": statistics.median(a for a, _ in pairs)}
            row |= {"without": statistics.median(b for _, b in pairs), "ratio": mean, "standard_error": error}
            rows.append(row)
        await asyncio.sleep(1)
        return rows, asker.captured, await engine.settle_states([])
    finally:
        await engine.close()


def extract(target: Path, draft: Path, answers: Sequence[Completion], captures: Captures | None) -> dict[str, Any]:
    """Return how long extraction takes."""
    config = json.loads((draft / "config.json").read_text())
    samples = [Sample(one.request_id, "chat", list(one.prompt_ids), list(one.token_ids)) for one in answers]
    with tempfile.TemporaryDirectory() as work:
        states = HiddenStates(
            Path(work), samples, config["eagle_aux_hidden_state_layer_ids"], describe(target).hidden_size
        )
        started_s = time.monotonic()
        states.extract(target, captured=captures)
        seconds = time.monotonic() - started_s
    return {
        "seconds": seconds,
        "tokens": sum(len(sample.token_ids) for sample in samples),
        "answer_tokens": sum(len(sample.completion_ids) for sample in samples),
        "files": {} if captures is None else dict(captures.counts),
    }


def main() -> None:
    """Measure, in a process that has the engine's environment from its start."""
    parser = argparse.ArgumentParser(description="Measure what capturing hidden states costs and saves.")
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path, help="directory of an EAGLE-3 draft that reads the target's last layer")
    parser.add_argument("--prompts", type=int, default=8, help="of each domain")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    os.environ.update(served.child_environment() | openmp_preload())
    with tempfile.TemporaryDirectory() as folder:
        files = CapturedFiles(Path(folder) / "queries.db")
        files.make()
        rows, answers, counts = asyncio.run(serve(given.target, given.draft, files, given))
        size = files.num_bytes()
        again = answers[-2 * given.prompts :]  # a block's: each prompt once
        captures = Captures(files.path_of, describe(given.target).sha256)
        without, with_it = (extract(given.target, given.draft, again, one) for one in (None, captures))
    print(without, with_it, sep="\n", flush=True)
    found = {"served": rows, "states": counts, "bytes": size, "extracted": {"without": without, "with": with_it}}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
