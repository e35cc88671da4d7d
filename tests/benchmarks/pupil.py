"""A draft that a benchmark trains for itself: nothing registers or serves it."""

from collections.abc import Sequence
from pathlib import Path

from infra.artifacts import open_artifact
from infra.versions import Pair
from models.core.drafting.draft_families import family_named, family_of
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.params import BaseParams
from tasks.distill_draft import prepare_teachers, untrained
from tasks.measure.run import Run


def teach(
    run: Run,
    pair: Pair,
    start: Path | None,
    params: BaseParams,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    seed: int,
    name: str,
) -> tuple[Path, distill.Report]:
    """Train a draft on samples and keep it in the benchmark's folder.

    Args:
        run: the benchmark.
        pair: whose target it drafts for.
        start: the draft to go on from, None for a new one of the recipe's family.
        params: of the training.
        samples: what it learns.
        num_draft_tokens: K.
        seed: of the training.
        name: of the draft's folder.

    Returns:
        The draft's directory, with the weights as rounded as they are served, and what the training tells of itself.
    """
    assert isinstance(params, distill.Params)  # which a recipe's fields can't say without importing torch
    target_dir, work = open_artifact(pair.target_files), run.folder / "states"
    draft = untrained(run.recipe.draft, start, target_dir, samples)
    device = run.settings.device
    teachers = [open_artifact(one) for one in prepare_teachers(params)]
    report = distill.train(
        draft, target_dir, samples, params, num_draft_tokens, work, seed, device=device, teacher_dirs=teachers
    )
    directory = run.folder / "drafts" / name
    directory.mkdir(parents=True, exist_ok=True)
    (family_named(run.recipe.draft.name) if start is None else family_of(start)).save(draft, directory)
    return directory, report
