"""llama.cpp as a baseline: the file that the target is made of, answered by what most people run such a file with.

It computes with the file's own four-bit weights and rounds their inputs to 8 bits, where every other side computes in
the target's number format: its answers may differ, so they are not held to the others'. Its prompt look-up is the only
way of drafting that its Python library brings. It has an environment of its own, which `make baselines` compiles, and
no HTTP on its way, which is to its advantage.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.client import Answer
from infra.installed import INTERPRETER
from models import catalog
from models.recipe import Recipe
from models.sources import Prompt
from models.targets import stop_ids
from tasks.measure.baselines import answer_of, encoder, run_process
from tasks.measure.run import Bar

LLAMACPP = "llama.cpp"
SIDES = (LLAMACPP, f"{LLAMACPP}, prompt lookup")
PROCESS = Path(__file__).with_name("llamacpp_process.py")


def why_not(recipe: Recipe) -> str | None:
    """Return why llama.cpp can't be asked, None if it can."""
    if not INTERPRETER.is_file():
        return "it is not installed; `make baselines` compiles it"
    if not hasattr(catalog.load("targets", recipe.target.name), "find_gguf"):
        return f"target {recipe.target.name} is not made of a GGUF file"
    return None


def run_llamacpp(
    recipe: Recipe, target_dir: Path, prompts: Sequence[Prompt], folder: Path, bar: Bar
) -> list[tuple[str, Answer]]:
    """Answer prompts greedily, one at a time, and return side and answer in the order they were given.

    Raises:
        RuntimeError: the process failed; the message has the end of its log.
    """
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
    argv = [str(INTERPRETER), "-I", str(PROCESS), str(job)]  # else modules beside it would be taken for Python's own
    rows = run_process(argv, {}, answers, folder / "llamacpp.log", "llama.cpp's process", bar)
    return [
        (row.pop("side"), answer_of(prompts[row.pop("prompt")], {"first_token_ms": row["arrival_ms"][0], **row}))
        for row in rows
    ]
