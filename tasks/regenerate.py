"""Let the target answer logged prompts again while nobody asks it: more of what a request's limit cut off, and anew.

A small window then teaches more: a draft that learnt only how answers begin drafts badly further on, and a second
answer to each prompt raises τ too (docs/results/adaptation.md).

Only the challenger learns it: the gate scores what was served. Only prompts of the window's training side are asked,
which have full consent; an answer that the scrubber would change is thrown away. It is named by its row, so that an
erasure finds it, with a word behind that where it stands beside the served answer.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

from infra import scrub
from infra.artifacts import Artifact, open_artifact
from infra.consent import AGAIN, QueryRow
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import load_settings
from infra.versions import Pair
from infra.windows import Window
from models.chats import ChatEncoder
from models.core.checkpoints.loading import load_model
from models.core.layers.kernels import fast_dtype
from models.core.learning import answering
from models.core.learning.answering import Ask
from models.core.learning.hidden import Sample
from models.recipe import Recipe, Regeneration
from models.targets import stop_ids
from models.types import MIN_COMPLETION
from tasks.stages import cached_step, progress, run_logger, task
from tasks.stages.samples import append_samples, draw_per_domain, read_samples, read_written, write_samples
from tasks.stages.throttle import device_of, throttled

BATCH = 32
FILE = "answers.jsonl"
CUT = "length"  # how an answer ended that has more to say


@task
def regenerate(recipe: Recipe, pair: Pair, window: Window, samples: Artifact) -> Artifact:
    """Return what the challenger learns: the samples' training part, with what was answered again, if anything is.

    It stands still while the service answers, and ends after the recipe's minutes with what it has. Each batch is kept
    when it is complete, so that a killed run asks only for the rest.
    """
    again = recipe.refresh.regenerate
    if again is None:
        return samples

    def make(directory: Path, work: Path) -> None:
        rows = {row.id: row for row in QueryLog(load_settings().querylog).rows(window.first_seq, window.last_seq)}
        learnt = read_samples(samples, "train")
        asked = questions(choose(learnt, rows, again, recipe.seed), rows, again, recipe.engine.max_model_len)
        answers = _answered(recipe, again, open_artifact(pair.target_files), asked, work / FILE)
        write_samples(directory, "train", merge(learnt, answers))

    params = {
        "regenerate": again.model_dump(mode="json"),
        "seed": recipe.seed,
        "max_model_len": recipe.engine.max_model_len,
        "window": [window.first_seq, window.last_seq],
    }
    work = throttled(make, device_of(recipe.refresh_distill()))
    inputs = {"target": pair.target_files, "samples": samples}
    return cached_step("answered", "samples", params, work, inputs, (write_samples, answering))


class Question(NamedTuple):
    """What the target is asked again: to go on with an answer, or to answer its prompt anew."""

    sample: Sample
    ask: Ask
    is_anew: bool

    @property
    def name(self) -> str:
        """Of the answer."""
        return f"{self.sample.id}{AGAIN}" if self.is_anew else self.sample.id

    def answered(self, said: list[int]) -> Sample:
        """Return the answer as it is learnt."""
        if not self.is_anew:
            return self.sample._replace(completion_ids=self.sample.completion_ids + said)
        anew = self.sample._replace(id=self.name, completion_ids=said, rejected=None)
        return anew._replace(temperature=self.ask.temperature)


def choose(learnt: Sequence[Sample], rows: Mapping[str, QueryRow], again: Regeneration, seed: int) -> list[Sample]:
    """Return whose prompts are asked again: a draw of each domain, of the window's own rows.

    Where nothing is answered anew, it is of those whose answers go on.
    """
    own = [one for one in learnt if one.id in rows and not rows[one.id].structured]  # the grammar is not at hand
    if again.temperature is None:
        own = [one for one in own if _was_cut(one, rows, again)]
    return draw_per_domain(own, again.per_domain, seed)


def questions(
    chosen: Sequence[Sample], rows: Mapping[str, QueryRow], again: Regeneration, max_model_len: int
) -> list[Question]:
    """Return what is asked; what wants as many tokens, and of that texts of like length, together."""
    found: list[Question] = []
    for one in chosen:
        if _was_cut(one, rows, again):
            left = min(again.max_tokens - len(one.completion_ids), max_model_len - len(one.token_ids))
            found.append(Question(one, Ask(one.token_ids, max(1, left), one.temperature), is_anew=False))
        if again.temperature is not None:
            left = min(again.max_tokens, max_model_len - len(one.prompt_ids))
            found.append(Question(one, Ask(one.prompt_ids, max(1, left), again.temperature), is_anew=True))
    return sorted(found, key=lambda one: (one.ask.num_tokens, len(one.ask.token_ids), one.name))


def _was_cut(one: Sample, rows: Mapping[str, QueryRow], again: Regeneration) -> bool:
    return rows[one.id].finish_reason == CUT and len(one.completion_ids) < again.max_tokens


def merge(learnt: Sequence[Sample], answers: Sequence[Sample]) -> list[Sample]:
    """Return all samples; an answer that goes on with another one of the same name takes its place."""
    longer = {one.id: one for one in answers}
    return [longer.pop(one.id, one) for one in learnt] + list(longer.values())


def _answered(
    recipe: Recipe, again: Regeneration, target_dir: Path, asked: Sequence[Question], file: Path
) -> list[Sample]:
    """Return answers; those in `file` are not asked for again, the others are added to it."""
    started, device = time.monotonic(), device_of(recipe.refresh_distill())
    until_s = started + 60 * again.max_minutes
    written = {one.id: one for one in read_written(file)}
    batches = [asked[start : start + BATCH] for start in range(0, len(asked), BATCH)]
    left = [each for each in enumerate(batches) if any(one.name not in written for one in each[1])]
    counts: Counter[str] = Counter()
    if left:
        model = load_model(target_dir, fast_dtype(device), device)
        encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
        stops = stop_ids(target_dir)
    with progress("answer logged prompts again") as show:
        for number, batch in left:
            if time.monotonic() >= until_s:
                counts["not asked in time"] += len(batch)
                continue
            rng = torch.Generator(device).manual_seed(recipe.seed * 1_000_003 + number)
            asks = [one.ask for one in batch]
            said = answering.go_on(model, asks, stops, rng, lambda: time.monotonic() >= until_s)
            made = [one.answered(more) for one, more in zip(batch, said, strict=True)]
            kept = [one for one in made if _may_be_kept(one, encoder, counts)]
            append_samples(file, kept)
            written |= {one.id: one for one in kept}
            counts["tokens"] += sum(map(len, said))
            show(number + 1, len(batches), f"{counts['tokens'] / (time.monotonic() - started):.0f} tokens/s")
    _tell(again, len(written), counts, time.monotonic() - started)
    return list(written.values())


def _may_be_kept(answer: Sample, encoder: ChatEncoder, counts: Counter[str]) -> bool:
    """Return whether an answer may be learnt: long enough, and nothing in it that a logged one would not hold."""
    short = len(answer.completion_ids) < MIN_COMPLETION
    if not short and encoder.rewrite(answer.completion_ids, scrub.scrub)[0] == answer.completion_ids:
        return True
    counts["too short" if short else "not kept by the scrubber"] += 1
    return False


def _tell(again: Regeneration, num_answers: int, counts: Counter[str], seconds: float) -> None:
    more = "".join(f", {number} {what}" for what, number in sorted(counts.items()))
    run_logger().info("answered %d logged prompts again in %.0f s%s", num_answers, seconds, more)
    metrics = {"answers": float(num_answers), "seconds": seconds}
    metrics |= {what.replace(" ", "_"): float(number) for what, number in counts.items()}
    open_registry().store.record_run("answer again", again.model_dump(), metrics, [])
