"""What the served pair is measured against without an endpoint: transformers, and the reference engine.

They run in a process of their own, `python -m tasks.measure.baselines JOB.json`, because the processor's threads belong
to whoever is measured, and because a model that was loaded is only really gone when its process is.

All of them answer one prompt at a time and greedily, with the target's own weights, in the engine's number format and
with as many threads as this process may use cores. Assisted generation is transformers' model-free kind, prompt lookup:
a small model with the target's tokenizer to assist it is not at hand. The reference engine is there with the draft and,
to hold its forward pass to vLLM's, started without one.
"""

import asyncio
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from infra.client import Answer
from infra.installed import openmp_preload
from infra.processes import Child
from models import catalog
from models.chats import ChatEncoder
from models.engines import Sampling
from models.params import BaseParams
from models.sources import Prompt
from models.types import Frozen
from tasks.measure.run import Bar

UNDRAFTED = "reference engine without a draft"
POLL_S = 2.0  # seldom: the cores are being measured


class Timed(NamedTuple):
    """One answer.

    Attributes:
        token_ids: of the answer.
        arrival_ms: when each token came, from the start; empty where only the ends are known.
        first_token_ms: when the first one came.
        seconds: until the last one.
        drafted_per_step, accepted_per_step: as the engine counted them; None where it did not.
    """

    token_ids: tuple[int, ...]
    arrival_ms: tuple[float, ...]
    first_token_ms: float
    seconds: float
    drafted_per_step: tuple[int, ...] | None = None
    accepted_per_step: tuple[int, ...] | None = None


# (prompt's token ids, most tokens of the answer) → the answer.
Baseline = Callable[[list[int], int], Timed]


def open_baselines(
    target_dir: Path, draft_dir: Path, dtype: str, num_draft_tokens: int, max_model_len: int
) -> Mapping[str, Baseline]:
    """Load every baseline, with K of drafts and of look-up, and let this process compute on all of its cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=getattr(torch, dtype)).eval()
    engine_params = catalog.parse(
        "engines",
        {"name": "torch", "num_draft_tokens": num_draft_tokens, "max_model_len": max_model_len, "dtype": dtype},
    )
    return {
        "transformers": _generating(model, {}),
        "transformers, prompt lookup": _generating(model, {"prompt_lookup_num_tokens": num_draft_tokens}),
        "reference engine": _reference(target_dir, draft_dir, engine_params),
        UNDRAFTED: _reference(target_dir, None, engine_params),
    }


def encoder(target_dir: Path) -> Callable[[Prompt], list[int]]:
    """Return what makes a prompt's token ids, as the endpoint does."""
    encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
    return lambda prompt: prompt.encode(encoder)


class _Arrivals(BaseStreamer):
    """Notes when tokens come; the first that transformers hands over is the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take the tokens of one step."""
        if self._prompt_seen:
            self.times_s += [time.monotonic()] * value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


def _generating(model: Any, options: Mapping[str, Any]) -> Baseline:
    def answer(prompt_ids: list[int], max_tokens: int) -> Timed:
        arrivals, prompt, started_s = _Arrivals(), torch.tensor([prompt_ids]), time.monotonic()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sampling settings in the target's files, which greedy decoding ignores
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=arrivals,
                **options,
            )
        token_ids = tuple(output[0, len(prompt_ids) :].tolist())
        # A step may hand over drafted tokens that lie behind the end of the answer.
        arrival_ms = tuple(1000 * (moment - started_s) for moment in arrivals.times_s[: len(token_ids)])
        return Timed(token_ids, arrival_ms, arrival_ms[0], arrival_ms[-1] / 1000)

    return answer


def _reference(target_dir: Path, draft_dir: Path | None, params: BaseParams) -> Baseline:
    engine = asyncio.run(catalog.load("engines", params.name).start(target_dir, draft_dir, params))

    def answer(prompt_ids: list[int], max_tokens: int) -> Timed:
        started_s = time.monotonic()
        completion = asyncio.run(engine.generate(prompt_ids, Sampling(max_tokens=max_tokens), "baseline"))
        # The engine tells when its first token came, not when each did.
        seconds = time.monotonic() - started_s
        return Timed(
            completion.token_ids, (), completion.first_token_ms, seconds, completion.drafted, completion.accepted
        )

    return answer


class Job(Frozen):
    """What the process is to do; it writes one line a prompt and baseline to `answers`."""

    target_dir: Path
    draft_dir: Path
    dtype: str
    num_draft_tokens: int
    max_model_len: int
    max_tokens: int
    prompts: tuple[Prompt, ...]
    answers: Path


def run_offline(job: Job, folder: Path, bar: Bar) -> list[tuple[str, Answer]]:
    """Run the process to its end and return baseline and answer, in the order they were given.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(job.model_dump_json())
    argv = [sys.executable, "-m", "tasks.measure.baselines", str(file)]
    rows = run_process(argv, openmp_preload(), job.answers, folder / "offline.log", "the baselines' process", bar)
    return [(row["side"], Answer(**row["answer"])) for row in rows]


def run_process(
    argv: Sequence[str], environment: Mapping[str, str], answers: Path, log: Path, name: str, bar: Bar
) -> list[dict[str, Any]]:
    """Run a process that writes a line of JSON an answer to its end, and return the lines.

    What an earlier one wrote is removed; what else it says goes to the log, and the bar is told of the lines so far.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    answers.unlink(missing_ok=True)
    with Child.start(argv, environment, log, name) as child:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
            bar.show(len(answers.read_text().splitlines()) if answers.is_file() else 0)
    if code:
        raise RuntimeError(f"{name} ended with {code}\n{child.tail()}")
    return [json.loads(line) for line in answers.read_text().splitlines()]


def main() -> None:
    """Do one job."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    encode = encoder(job.target_dir)
    baselines = list(
        open_baselines(job.target_dir, job.draft_dir, job.dtype, job.num_draft_tokens, job.max_model_len).items()
    )
    for _, baseline in baselines:
        baseline(encode(job.prompts[0]), job.max_tokens)  # warm: the first run allocates
    with job.answers.open("w") as file:
        for number, prompt in enumerate(job.prompts):
            turn = number % len(baselines)
            for side, baseline in baselines[turn:] + baselines[:turn]:
                sent_s, timed = time.monotonic(), baseline(encode(prompt), job.max_tokens)
                answer = answer_of(prompt, {"sent_s": sent_s, **timed._asdict()})
                file.write(json.dumps({"side": side, "answer": answer.model_dump(mode="json")}) + "\n")
                file.flush()


def answer_of(prompt: Prompt, timed: Mapping[str, Any]) -> Answer:
    """Return an answer as a client has it, of the prompt and what a baseline told of it."""
    num_tokens = len(timed["token_ids"])
    return Answer(prompt_id=prompt.id, domain=prompt.domain, status="ok", num_tokens=num_tokens, **timed)


if __name__ == "__main__":
    main()
