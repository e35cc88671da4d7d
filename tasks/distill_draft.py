"""Train a draft: a new one, or a challenger that goes on from where it was."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

from infra.artifacts import Artifact, forget_others, open_artifact, publish, staged
from infra.consent import row_of
from infra.home import home_secret
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import load_settings
from infra.versions import Pair
from infra.views.charts import draw_losses, draw_validation
from infra.windows import Window
from models.core.drafting.draft_families import family_named, family_of, is_trained, name_of
from models.core.layers.kernels import is_out_of_memory
from models.core.learning import distill, fitted
from models.core.learning.hidden import Sample, cut_ends, usual_length
from models.core.learning.loop import Workers
from models.drafts import Draft
from models.params import BaseParams
from models.recipe import Recipe
from models.targets import describe
from models.types import Frozen
from tasks.find_challenger import Start
from tasks.prepare_target import prepare_target
from tasks.stages import cached_step, progress, run_logger, stage_key, task
from tasks.stages.samples import captures_of, read_samples, tell_captured
from tasks.stages.split import cluster_samples
from tasks.stages.throttle import device_of, throttled
from tasks.stages.workers import train_module

STATE, STATE_FILE = "state", "state.safetensors"
# Beside a draft's weights: what its training found out. Not in its config, by which compiled code is found again.
TRAINING = "training.json"


class Trained(Frozen):
    """What a training run left: the draft, as the engine loads it, and what the next run goes on from beside it."""

    draft: Artifact
    state: Artifact | None


@task
def distill_draft(recipe: Recipe, target: Artifact, samples: Artifact) -> Artifact:
    """Train a first draft on the samples' training part; an artifact of kind "draft", as the engine loads it.

    A refresh calls `train_challenger`.
    """
    assert isinstance(recipe.distill, distill.Params)  # which a recipe's fields can't say without importing torch
    return _train(recipe, recipe.distill, target, samples, None, None).draft


@task
def train_challenger(recipe: Recipe, pair: Pair, start: Start, samples: Artifact, window: Window) -> Trained:
    """Go on training on the samples' training part, with the settings of a refresh and the family of the start.

    Older rows and the first draft's samples are never validated with: of what the challenger learnt before, it would
    tell how much is forgotten, not how much is learnt.
    """
    params = recipe.refresh_distill()
    assert isinstance(params, distill.Params)
    return _train(recipe, params, pair.target_files, samples, start, window)


def prepare_teachers(params: distill.Params) -> list[Artifact]:
    """Build the models beside the target whose word a draft learns, or find them again."""
    return [prepare_target.fn(teacher.model) for teacher in params.teachers]


def teachers_in(params: BaseParams) -> dict[str, JsonValue]:
    """Return what a draft's lineage keeps: sha256 of each teacher's weights to its name and its weight in the mean."""
    assert isinstance(params, distill.Params)
    cards = [describe(open_artifact(one)) for one in prepare_teachers(params)]
    weights = [teacher.weight for teacher in params.teachers]
    return {card.sha256: {"name": card.name, "weight": one} for card, one in zip(cards, weights, strict=True)}


def trained_context(draft: Artifact) -> int | None:
    """Return the tokens of the longest text of a draft's last training, None of a draft that is not trained."""
    file = open_artifact(draft) / TRAINING
    return int(json.loads(file.read_bytes())["trained_context"]) if file.is_file() else None


def forget_states(kept: Collection[str]) -> None:
    """Remove the states that no run will go on from; a draft without its own gets a fresh optimizer."""
    forget_others(STATE, kept)
    folder = load_settings().local_artifacts / STATE
    for directory in folder.glob("[!.]*"):
        if directory.resolve().as_uri() not in kept:
            shutil.rmtree(directory)


def _train(
    recipe: Recipe,
    params: distill.Params,
    target: Artifact,
    samples: Artifact,
    start: Start | None,
    window: Window | None,
) -> Trained:
    family = family_named(recipe.draft.name) if start is None else family_of(open_artifact(start.files))
    teachers, device = prepare_teachers(params), device_of(params)
    inputs = {"target": target, "samples": samples}
    inputs |= {f"teacher {number}": teacher for number, teacher in enumerate(teachers)}
    if start is not None:
        inputs |= {"parent": start.files} | ({} if start.state is None else {STATE: start.state})
    number, seed = recipe.num_draft_tokens, recipe.seed
    settings = {
        "draft": recipe.draft.model_dump(mode="json"),
        # None of them changes what is learnt.
        "distill": params.model_dump(mode="json", exclude={"num_threads", "checkpoint_s", "device"}),
        "num_draft_tokens": number,
        "seed": seed,
    }
    if params.validation and window is not None:
        settings["validated"] = [window.first_seq, window.last_seq]
    code = (untrained, distill, family)
    end = load_settings().local_artifacts / STATE / stage_key("draft", settings, inputs, code)

    def make(directory: Path, work: Path) -> None:
        length = params.max_length or usual_length(read_samples(samples, "train"), params.batch_tokens)
        fitting = params.model_copy(update={"max_length": length})
        try:
            learn(directory, work, fitting)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            tokens = max(params.batch_tokens, length)  # that a step has at most
            fewer = {
                "batch_tokens": max(2, min(params.batch_tokens, tokens // 2)),
                "max_length": min(length, tokens // 2),
            }
            halved = fitting.model_copy(update=fewer)
            told = "memory of %s ran out with batches of %d tokens; trained anew with %d: %s"
            run_logger().warning(told, device, tokens, tokens // 2, error)
        torch.cuda.empty_cache()  # behind the block, which held what the failed step made
        learn(directory, work, halved)

    def learn(directory: Path, work: Path, params: distill.Params) -> None:
        target_dir = open_artifact(target)
        whole = read_samples(samples, "train")
        rows, kept_rows = fitted.share(_of_length(whole, params) if is_trained(family) else whole, params.heads)
        if params.validation and window is None:
            rows = _clustered(rows, target_dir)
        draft = untrained(recipe.draft, None if start is None else open_artifact(start.files), target_dir, rows)
        if not is_trained(family):
            if params.heads:
                raise ValueError(f"a draft of family {name_of(family)} is not trained, so no head can be fit behind it")
            if hasattr(family, "search"):
                with progress("search for the draft") as show:
                    answers = [(sample.prompt_ids, sample.completion_ids) for sample in rows]
                    family.search(draft, answers, number, seed, show)
            family.save(draft, directory)
            return
        unseen = None if window is None else _new_in(window, rows)
        captured = None if start is None or recipe.train is not None else captures_of(target_dir)

        def run(workers: Workers, folder: Path, on_progress: Callable[[distill.Progress], None]) -> distill.Report:
            return distill.train(
                draft,
                open_artifact(target),
                rows,
                params,
                number,
                folder,
                seed,
                on_progress,
                device if recipe.train is None else "cuda" if recipe.train.gpus else "cpu",
                state=None if start is None or start.state is None else open_artifact(start.state) / STATE_FILE,
                state_out=folder / STATE_FILE if params.schedule == "constant" else None,
                captured=captured,
                teacher_dirs=[open_artifact(teacher) for teacher in teachers],
                unseen=unseen,
                workers=workers,
            )

        with progress("distill the draft") as show:

            def on_progress(now: distill.Progress) -> None:
                loss = "" if now.loss is None else f", loss {now.loss:.3f}"
                tau = "" if now.tau is None else f", validated at τ {now.tau:.3f}"
                show(now.done, now.total, f"{now.stage}, {now.tokens_per_s:.0f} tokens/s{loss}{tau}")

            report = train_module(recipe.train, draft, run, work, on_progress)
        if captured is not None:
            tell_captured(captured, "learn from")
        if params.schedule == "constant":
            with staged(end) as kept:
                (work / STATE_FILE).replace(kept / STATE_FILE)
        family.save(draft, directory)
        context = max(len(sample.token_ids) for sample in rows)
        (directory / TRAINING).write_text(json.dumps({"trained_context": context}))
        fitted.fit(params.heads, draft.to("cpu"), target_dir, kept_rows, number, directory, work, seed)
        _record(report, {} if captured is None else captured.counts, params, work)

    draft = cached_step("draft", "draft", settings, throttled(make, device), inputs, code)
    return Trained(draft=draft, state=publish(end, STATE) if end.exists() else None)


def untrained(params: BaseParams, start: Path | None, target_dir: Path, samples: Sequence[Sample]) -> Draft:
    """Return what training on samples begins with: the draft to go on from, or a new one that knows their tokens."""
    tokens = [token for sample in samples for token in sample.completion_ids]  # no other ever has to be proposed
    counts = np.bincount(tokens, minlength=describe(target_dir).vocab_size)
    family = family_named(params.name) if start is None else family_of(start)
    if start is not None:
        return family.renew(family.load(start, target_dir), target_dir, counts)
    draft = family.create(params, target_dir, counts)
    if hasattr(family, "collect"):
        family.collect(draft, [sample.token_ids for sample in samples])
    return draft


def _of_length(samples: Sequence[Sample], params: distill.Params) -> list[Sample]:
    """Cut texts at the length that is learnt; ValueError where nothing of their answers is left."""
    assert params.max_length is not None
    kept = cut_ends(samples, params.max_length)
    if samples and not kept:
        shortest = min(len(sample.prompt_ids) for sample in samples)
        raise ValueError(
            f"max_length {params.max_length} leaves no answer to learn; the shortest prompt has {shortest}"
        )
    if num_longer := sum(len(sample.token_ids) > params.max_length for sample in samples):
        told = "%d of %d texts are longer than %d tokens: their ends are not learnt, %d have no answer before that"
        run_logger().info(told, num_longer, len(samples), params.max_length, len(samples) - len(kept))
    return kept


def _clustered(samples: Sequence[Sample], target_dir: Path) -> list[Sample]:
    """Return a build's samples with clusters, named by their first sample: their own names differ from home to home."""
    named: dict[str, str] = {}
    rows = cluster_samples(samples, home_secret(load_settings().home), target_dir)
    return [one._replace(cluster=named.setdefault(row.cluster, one.id)) for one, row in zip(samples, rows, strict=True)]


def _new_in(window: Window, samples: Sequence[Sample]) -> set[str]:
    ids = {row.id for row in QueryLog(load_settings().querylog).rows(window.first_seq, window.last_seq)}
    return {sample.id for sample in samples if row_of(sample.id) in ids}


def _record(report: distill.Report, captured: Mapping[str, int], params: distill.Params, work: Path) -> None:
    figures = [draw_losses(report.losses, work / "losses.svg")]
    metrics = {name: float(value) for name, value in report._asdict().items() if isinstance(value, int | float)}
    metrics |= {f"states/{why}": float(number) for why, number in captured.items()}
    if report.taus:
        figures.append(draw_validation(report.taus, work / "validation.svg"))
        step, tau = max(report.taus, key=lambda look: look[1])
        metrics |= {"validation/tau": tau, "validation/best_step": float(step), "validation/looks": len(report.taus)}
        told = "validated on %d answers: τ %.3f after step %d was the best of %d looks, the last after step %d"
        run_logger().info(told, report.num_validated, tau, step, len(report.taus), report.num_steps)
    elif params.validation:
        run_logger().info("nothing to validate with: no cluster of new answers is as small as the share")
    open_registry().store.record_run("distill", params.model_dump(), metrics, figures)
