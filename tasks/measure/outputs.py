"""Whether what was measured is still the target's own output; told before any speed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from models.sources import Prompt
from tasks.measure.compare_traffic import judge_outputs
from tasks.measure.endpoint import Endpoint, dump
from tasks.measure.run import Run
from tasks.promote import open_champions

Row = dict[str, Any]


def record_reference(run: Run, endpoint: Endpoint, prompts: Sequence[Prompt]) -> list[Row]:
    """Ask each prompt once without speculation, with what tells a near-tie.

    Call it after what is measured: the blocks that it leaves in the prefix cache have no keys of the draft.
    """
    with run.bar("reference outputs, speculation off", len(prompts)) as bar:
        endpoint.speculate(False)
        answers = endpoint.ask(prompts, gaps=True, on_answer=bar.advance)
        endpoint.speculate(True)
    return dump(answers)


def judge_answers(references: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Count the verdicts over answers that ended, of prompts that were asked any number of times."""
    target_dir = open_champions.fn().target_files.path
    by_prompt = {row["prompt_id"]: row for row in references}
    verdicts: Counter[str] = Counter()
    for row in answers:
        if row["status"] == "ok":
            verdicts.update(judge_outputs([by_prompt[row["prompt_id"]]], [row], target_dir).values())
    return verdicts


def sentence(verdicts: Mapping[str, int]) -> str:
    """Say what came of it."""
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "none"
    return f"Outputs against no speculation, answer by answer: {counts}."


def differing(verdicts: Mapping[str, int]) -> list[str]:
    """Return the failure that other outputs are, as a list of none or one."""
    count = verdicts.get("different", 0)
    return [f"{count} outputs differ from those without speculation"] if count else []
