"""Imported answers that are not like the target's: found before anything learns from them, and never gated by."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from infra import scrub
from infra.artifacts import Artifact, open_artifact
from infra.consent import ELSEWHERE
from models.chats import ChatEncoder
from models.core.checkpoints.loading import fast_dtype, load_model
from models.core.learning import answering
from models.core.learning.hidden import Sample
from models.recipe import Recipe
from models.targets import stop_ids
from models.types import MIN_COMPLETION, Estimate
from tasks.stages import cached_step, json_sha256
from tasks.stages.samples import Split, by_domain, draw_per_domain, read_samples, write_samples
from tasks.stages.task import run_logger, table
from tasks.stages.throttle import device_of, throttled

FILE = "differences.json"
Make = Callable[[Path, Path], None]
Samples = Mapping[Split, Sequence[Sample]]


def gate_by_own_answers(recipe: Recipe, target: Artifact, parts: Samples) -> tuple[Samples, dict[str, Estimate]]:
    """Return the parts with the target's own answers to what drafts are held to, in domains whose imports are unlike.

    An own answer is dropped, with its row, where the scrubber would change it or nothing in it could be scored. Also
    returns by how many nats a token each such domain's imports are unlike.
    """
    imported = [one for samples in parts.values() for one in samples if one.id.startswith(ELSEWHERE)]
    alone = {(one.domain, one.cluster or one.id): one for one in imported}  # of what is alike, as far as known, one
    asked = draw_per_domain(list(alone.values()), answering.NUM_PROMPTS, recipe.seed)
    found = _differences(recipe, target, asked) if asked else {}
    unlike = {domain: one for domain, one in found.items() if answering.unlike(one)}
    if not unlike:
        return parts, {}
    for domain, one in unlike.items():
        told = "imported answers of %s are unlike the target's: to it a token is %.2f nats less likely than its own,"
        told += " at least %.2f; a draft learns from them, and is gated by the target's own answers"
        run_logger().warning(told, domain, -one.value, -one.high)
    held_to: tuple[Split, Split] = ("held_out", "regression")
    tests = [one for part in held_to for one in parts[part] if one.id.startswith(ELSEWHERE) and one.domain in unlike]
    own = {one.id: one for one in _answers(recipe, target, tests)} if tests else {}
    names = {one.id for one in tests}
    gated: dict[Split, list[Sample]] = {
        part: [_with_answer(one, own) for one in parts[part] if one.id not in names or one.id in own]
        for part in held_to
    }
    return {**parts, **gated}, unlike


def _with_answer(sample: Sample, own: Mapping[str, Sample]) -> Sample:
    return sample._replace(completion_ids=own[sample.id].completion_ids, rejected=None) if sample.id in own else sample


def _differences(recipe: Recipe, target: Artifact, asked: Sequence[Sample]) -> dict[str, Estimate]:
    def make(directory: Path, _: Path) -> None:
        device, target_dir = device_of(recipe.refresh_distill()), open_artifact(target)
        model = load_model(target_dir, fast_dtype(device), device)
        found = {domain: answering.compare(model, of_domain) for domain, of_domain in sorted(by_domain(asked).items())}
        (directory / FILE).write_text(json.dumps({domain: one.model_dump() for domain, one in found.items()}))

    made = _produced("unlike", "figures", recipe, target, asked, make)
    told = json.loads((open_artifact(made) / FILE).read_text())
    found = {domain: Estimate.model_validate(one) for domain, one in told.items()}
    rows = [
        {"domain": name, "nats a token": round(one.value, 3), "at most": round(one.high, 3)}
        for name, one in found.items()
    ]
    table("imported", rows, "imported answers against the target's own, by the target")
    return found


def _answers(recipe: Recipe, target: Artifact, tests: Sequence[Sample]) -> list[Sample]:
    def make(directory: Path, _: Path) -> None:
        device, target_dir = device_of(recipe.refresh_distill()), open_artifact(target)
        encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
        model = load_model(target_dir, fast_dtype(device), device)
        lengths = [max(len(one.completion_ids), answering.MOST_TOKENS) for one in tests]
        rng, max_len = torch.Generator(device).manual_seed(recipe.seed), recipe.engine.max_model_len
        own = answering.answer(model, tests, lengths, stop_ids(target_dir), max_len, rng)
        long = [one for one in own if len(one.completion_ids) >= MIN_COMPLETION]
        kept = [one for one in long if encoder.rewrite(one.completion_ids, scrub.scrub)[0] == one.completion_ids]
        write_samples(directory, "held_out", kept)

    return read_samples(_produced("own_answers", "samples", recipe, target, tests, make), "held_out")


def _produced(stage: str, kind: str, recipe: Recipe, target: Artifact, asked: Sequence[Sample], make: Make) -> Artifact:
    content = [[one.id, one.prompt_ids, one.completion_ids, one.temperature] for one in asked]
    params = {"asked": json_sha256(content), "max_model_len": recipe.engine.max_model_len, "seed": recipe.seed}
    work = throttled(make, device_of(recipe.refresh_distill()))
    return cached_step(stage, kind, params, work, {"target": target}, (answering, write_samples))
