"""Train a draft: a new one, or one that goes on from its parent."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.artifacts import Artifact, open_artifact
from infra.priority import gently
from infra.registry import open_registry
from infra.settings import load_settings
from infra.views.figures import draw_losses
from models import distill
from models.drafts import family_named, family_of, name_of
from models.hidden import Sample
from models.recipe import Recipe
from models.targets import describe
from tasks.stages import produce
from tasks.stages.reporting import progress
from tasks.stages.samples import read_samples


@task(cache_policy=NO_CACHE)
def distill_draft(recipe: Recipe, target: Artifact, samples: Artifact, parent: Artifact | None = None) -> Artifact:
    """Train on the samples' training part; an artifact of kind "draft", as the engine loads it.

    Args:
        recipe: which draft, and how it is trained; a refresh has settings of its own, and stays with its parent's
            family.
        target: what the draft is for.
        samples: the target's answers.
        parent: what to start from; None starts a new draft.
    """
    params = recipe.distill if parent is None else recipe.refresh_distill()
    assert isinstance(params, distill.Params)  # which a recipe's fields can't say without importing torch
    family = family_named(recipe.draft.name) if parent is None else family_of(open_artifact(parent))

    def make(directory: Path, work: Path) -> None:
        target_dir, rows = open_artifact(target), read_samples(samples, "train")
        counts = _count_tokens(rows, describe(target_dir).vocab_size)
        if parent is None:
            draft = family.create(recipe.draft, target_dir, counts)
        else:
            draft = family.renew(family.load(open_artifact(parent), target_dir), target_dir, counts)
        if not family.TRAINED:
            family.save(draft, directory)
            return
        with progress("distill the draft") as show:

            def on_progress(now: distill.Progress) -> None:
                loss = "" if now.loss is None else f", loss {now.loss:.3f}"
                show(now.done, now.total, f"{now.stage}, {now.tokens_per_s:.0f} tokens/s{loss}")

            device = load_settings().device
            report = distill.train(
                draft, target_dir, rows, params, recipe.num_draft_tokens, work, recipe.seed, on_progress, device
            )
        family.save(draft, directory)
        _record(report, params, work)

    return produce(
        stage="draft",
        kind="draft",
        params={
            "draft": recipe.draft.model_dump(mode="json"),
            # Neither changes what is learnt.
            "distill": params.model_dump(mode="json", exclude={"num_threads", "checkpoint_s"}),
            "num_draft_tokens": recipe.num_draft_tokens,
            "seed": recipe.seed,
        },
        inputs={"target": target, "samples": samples, **({} if parent is None else {"parent": parent})},
        code=(__name__, "models.distill", f"models.drafts.{name_of(family)}", f"models.losses.{params.loss.name}"),
        make=gently(make),
    )


def _count_tokens(samples: Sequence[Sample], vocab_size: int) -> np.ndarray:
    """Return [V]: how often each token occurs in the answers; a draft never has to propose another."""
    tokens = [token for sample in samples for token in sample.completion_ids]
    return np.bincount(tokens, minlength=vocab_size)


def _record(report: distill.Report, params: distill.Params, work: Path) -> None:
    figure = draw_losses(report.losses, work / "losses.png")
    metrics = {name: float(value) for name, value in report._asdict().items() if isinstance(value, int | float)}
    open_registry().store.record_run("distill", params.model_dump(), metrics, [figure])
