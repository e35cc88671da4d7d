"""The process that answers with llama.cpp, in the environment of `make baselines`, where nothing of redraft is.

`python llamacpp_process.py JOB.json`, see `tasks.measure.baselines`; answers go to a file of the job, a line each.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

Job = Mapping[str, Any]


def main() -> None:
    """Do one job: every prompt by every side, which take turns at being the first."""
    job = json.loads(Path(sys.argv[1]).read_text())
    look_up = LlamaPromptLookupDecoding(num_pred_tokens=job["num_draft_tokens"])
    sides = list(zip(job["sides"], (_load(job), _load(job, draft_model=look_up)), strict=True))
    for _, model in sides:
        _answer(model, job["prompts"][0], job)  # warm: the first run allocates
        model.reset()  # or the first prompt would be found in its cache
    with Path(job["answers"]).open("w") as file:
        for number, prompt_ids in enumerate(job["prompts"]):
            turn = number % len(sides)
            for side, model in sides[turn:] + sides[:turn]:
                row = {"side": side, "prompt": number, **_answer(model, prompt_ids, job)}
                file.write(json.dumps(row) + "\n")
                file.flush()


def _load(job: Job, **options: Any) -> Llama:
    cores = len(os.sched_getaffinity(0))
    threads = {"n_threads": cores, "n_threads_batch": cores}
    return Llama(job["gguf"], n_ctx=job["max_model_len"], verbose=False, **threads, **options)


def _answer(model: Llama, prompt_ids: Sequence[int], job: Job) -> dict[str, Any]:
    token_ids: list[int] = []
    arrival_ms: list[float] = []
    sent_s = time.monotonic()
    for token in model.generate(list(prompt_ids), temp=0.0):
        arrival_ms.append(1000 * (time.monotonic() - sent_s))
        token_ids.append(token)
        if token in job["stop_ids"] or len(token_ids) == job["max_tokens"]:
            break
    return {"sent_s": sent_s, "token_ids": token_ids, "arrival_ms": arrival_ms, "seconds": arrival_ms[-1] / 1000}


if __name__ == "__main__":
    main()
