"""What a new draft brought: acceptance before and after on the same requests, whether outputs stayed the target's."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.core.evaluation.acceptance import Trace, difference, summarise
from models.core.evaluation.golden import Golden, equal_output, load_golden
from models.sources import Prompt
from tasks.measure.endpoint import Endpoint, dump
from tasks.measure.run import Run
from tasks.promote import open_champions

Row = dict[str, Any]


def compare_acceptance(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
    """Compare answers to the same requests, by domain; ValueError if one has no answer to compare.

    Their rows have prompt_id, domain, token_ids, drafted_per_step and accepted_per_step. Returns summaries `before` and
    `after`, and estimates `gain`, of τ, paired by request, and `relative_gain`, as JSON.
    """
    comparisons = {}
    for domain in sorted({str(row["domain"]) for row in before}):
        old, new = (traces_of(rows, domain) for rows in (before, after))
        gain, first = difference(old, new), summarise(old)
        if first.tau is None:
            raise ValueError(f'domain "{domain}" has no answer with a verification step')
        comparisons[domain] = {
            "before": first.model_dump(mode="json"),
            "after": summarise(new).model_dump(mode="json"),
            "gain": gain.model_dump(),
            "relative_gain": {end: value / first.tau.value for end, value in gain},
        }
    return comparisons


def compare_outputs(
    references: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], target_dir: Path
) -> Row:
    """Count verdicts on speculated outputs by those without speculation, at the target's own threshold."""
    verdicts, (_, threshold) = output_verdicts(references, outputs, target_dir), load_golden(target_dir)
    return {"num_compared": len(verdicts), "verdicts": dict(Counter(verdicts.values())), "threshold": threshold}


def output_verdicts(
    references: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], target_dir: Path
) -> dict[str, str]:
    _, threshold = load_golden(target_dir)
    by_prompt = {row["prompt_id"]: row for row in outputs}
    return {str(row["prompt_id"]): _verdict(row, by_prompt[row["prompt_id"]], threshold) for row in references}


def _verdict(reference: Mapping[str, Any], output: Mapping[str, Any], threshold: float) -> str:
    golden = Golden(prompt_ids=(), token_ids=tuple(reference["token_ids"]), gaps=tuple(reference["gaps"]))
    return equal_output(golden, output["token_ids"], threshold)


def traces_of(rows: Sequence[Mapping[str, Any]], domain: str = "") -> list[Trace]:
    """Return what was accepted of the answers in a domain, "" for all, of which the steps are known."""
    return [
        Trace(
            request_id=str(row["prompt_id"]),
            token_ids=tuple(row["token_ids"]),
            drafted=tuple(row["drafted_per_step"]),
            accepted=tuple(row["accepted_per_step"]),
            domain=str(row["domain"]),
        )
        for row in rows
        if domain in ("", row["domain"]) and row["accepted_per_step"] is not None
    ]


def record_reference(run: Run, endpoint: Endpoint, prompts: Sequence[Prompt]) -> list[Row]:
    """Ask each prompt once without speculation, with what tells a near-tie.

    Call it last: the blocks that it leaves in the prefix cache have no keys of the draft.
    """
    with run.bar("reference outputs, speculation off", len(prompts)) as bar:
        endpoint.client.speculate(False)
        answers = endpoint.ask(prompts, gaps=True, on_answer=bar.advance)
        endpoint.client.speculate(True)
    return dump(answers)


def answer_verdicts(references: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Count the verdicts over answers that ended, of prompts that were asked any number of times."""
    _, threshold = load_golden(open_champions.fn().target_files.path)
    by_prompt = {row["prompt_id"]: row for row in references}
    return Counter(_verdict(by_prompt[row["prompt_id"]], row, threshold) for row in answers if row["status"] == "ok")


def sentence(verdicts: Mapping[str, int]) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "none"
    return f"Outputs against no speculation, answer by answer: {counts}."


def differing(verdicts: Mapping[str, int]) -> list[str]:
    count = verdicts.get("different", 0)
    return [f"{count} outputs differ from those without speculation"] if count else []
