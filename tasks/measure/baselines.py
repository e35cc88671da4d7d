"""What the served pair is measured against without an endpoint: transformers, the reference engine, and llama.cpp.

They run in processes of their own, because the processor's threads belong to whoever is measured, and because a model
that was loaded is only really gone when its process is. All answer one prompt at a time and greedily, with as many
threads as this process may use cores; transformers and the reference engine with the target's own weights, in the
engine's number format. Assisted generation is transformers' model-free kind, prompt lookup: a small model with the
target's tokenizer is not at hand. The reference engine is there with the draft and, to hold its forward pass to
vLLM's, without one.

llama.cpp reads the file that the target is made of. It computes with the file's own four-bit weights and rounds their
inputs to 8 bits: its answers may differ, so they are not held to the others'. Prompt look-up is the only way of
drafting that its Python library brings. It has an environment of its own, which `make baselines` compiles.
"""

import asyncio
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

from infra.client import Answer
from infra.machine import INTERPRETER, openmp_preload
from infra.processes import Child
from models import catalog
from models.chats import ChatEncoder
from models.engines import Sampling
from models.params import BaseParams
from models.recipe import Recipe
from models.sources import Prompt
from models.targets import stop_ids
from models.types import Frozen
from tasks.measure.endpoint import dump
from tasks.measure.run import Bar

LLAMACPP = "llama.cpp"
SIDES = (LLAMACPP, f"{LLAMACPP}, prompt lookup")
POLL_S = 2.0  # seldom: the cores are being measured

Row = dict[str, Any]
# (prompt's token ids, most tokens of the answer) → the answer, to no prompt of a name yet; without arrivals where only
# the ends are known.
Baseline = Callable[[list[int], int], Answer]


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
        "reference engine without a draft": _reference(target_dir, None, engine_params),
    }


def encoder(target_dir: Path) -> Callable[[Prompt], list[int]]:
    encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
    return lambda prompt: prompt.encode(encoder)


class _Arrivals(BaseStreamer):
    """Notes when tokens come; the first that transformers hands over is the prompt."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        if self._prompt_seen:
            self.times_s += [time.monotonic()] * value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to do."""


def _generating(model: Any, options: Mapping[str, Any]) -> Baseline:
    def answer(prompt_ids: list[int], max_tokens: int) -> Answer:
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
        return _answer(
            sent_s=started_s,
            token_ids=token_ids,
            arrival_ms=arrival_ms,
            first_token_ms=arrival_ms[0],
            seconds=arrival_ms[-1] / 1000,
        )

    return answer


def _reference(target_dir: Path, draft_dir: Path | None, params: BaseParams) -> Baseline:
    engine = asyncio.run(catalog.load("engines", params.name).start(target_dir, draft_dir, params))

    def answer(prompt_ids: list[int], max_tokens: int) -> Answer:
        started_s = time.monotonic()
        said = asyncio.run(engine.generate(prompt_ids, Sampling(max_tokens=max_tokens), "baseline"))
        return _answer(
            seconds=time.monotonic() - started_s,
            sent_s=started_s,
            token_ids=said.token_ids,
            first_token_ms=said.first_token_ms,  # the engine tells when its first token came, not when each did
            drafted_per_step=said.drafted,
            accepted_per_step=said.accepted,
        )

    return answer


def _answer(**told: Any) -> Answer:
    return Answer(prompt_id="", domain="", status="ok", num_tokens=len(told["token_ids"]), **told)


def _row(side: str, prompt: Prompt, answer: Answer) -> Row:
    return {"side": side, **dump([answer])[0], "prompt_id": prompt.id, "domain": prompt.domain}


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


def run_offline(job: Job, folder: Path, bar: Bar) -> list[Row]:
    """Run the process, and return each answer with its side; RuntimeError with the end of its log if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(job.model_dump_json())
    argv = [sys.executable, "-m", "tasks.measure.baselines", str(file)]
    return _run(argv, openmp_preload(), job.answers, folder / "offline.log", "the baselines' process", bar)


def why_not(recipe: Recipe) -> str | None:
    """Return why llama.cpp can't be asked, None if it can."""
    if not INTERPRETER.is_file():
        return "it is not installed; `make baselines` compiles it"
    if not hasattr(catalog.load("targets", recipe.target.name), "find_gguf"):
        return f"target {recipe.target.name} is not made of a GGUF file"
    return None


def run_llamacpp(recipe: Recipe, target_dir: Path, prompts: Sequence[Prompt], folder: Path, bar: Bar) -> list[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    encode, answers, job = encoder(target_dir), folder / "answers.jsonl", folder / "job.json"
    asked = {
        "gguf": str(catalog.load("targets", recipe.target.name).find_gguf()),
        "sides": SIDES,
        "prompts": [encode(prompt) for prompt in prompts],
        "stop_ids": sorted(stop_ids(target_dir)),
        "max_tokens": recipe.generate.max_tokens,
        "max_model_len": recipe.engine.max_model_len,
        "num_draft_tokens": recipe.num_draft_tokens,
        "answers": str(answers),
    }
    job.write_text(json.dumps(asked))
    # Without -I modules beside it would be taken for Python's own.
    argv = [str(INTERPRETER), "-I", str(Path(__file__).with_name("llamacpp_process.py")), str(job)]
    rows = _run(argv, {}, answers, folder / "llamacpp.log", "llama.cpp's process", bar)
    return [
        _row(row.pop("side"), prompts[row.pop("prompt")], _answer(first_token_ms=row["arrival_ms"][0], **row))
        for row in rows
    ]


def _run(
    argv: Sequence[str], environment: Mapping[str, str], answers: Path, log: Path, name: str, bar: Bar
) -> list[Row]:
    """Run a process that writes a line of JSON an answer, and return the lines; the bar is told of those so far."""
    answers.unlink(missing_ok=True)
    with Child.start(argv, environment, log, name) as child:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
            bar.show(len(answers.read_text().splitlines()) if answers.is_file() else 0)
    if code:
        raise RuntimeError(f"{name} ended with {code}\n{child.tail()}")
    return [json.loads(line) for line in answers.read_text().splitlines()]


def main() -> None:
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
                file.write(json.dumps(_row(side, prompt, baseline(encode(prompt), job.max_tokens))) + "\n")
                file.flush()


if __name__ == "__main__":
    main()
