"""Heads beside a draft that say yes or no, such as whether to draft on: fit behind its training, kept in its directory.

A method that has such a head offers

- `FILE`: the head's name in a folder;
- `FITS`: the keys that fitting reads, and who decodes with the head does not;
- `fit(draft, target_dir, samples, num_draft_tokens, work_dir, params, seed) -> params`: fits it, writes it as `FILE`
  into `work_dir` and returns settings whose `head` is that file;
- `require_fit(params)`, optional: refuses settings that `fit` could not work with, before anything is trained.

They lie in a folder of their own, since engines read all weights that stand beside a draft's.
"""

from collections.abc import Sequence
from pathlib import Path

from models import catalog
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.params import BaseParams, require_unsaid

FOLDER = "heads"
EVERY = 8  # one answer in so many is kept from the draft, for the heads


def require(family: str, params: BaseParams) -> None:
    """Raise ValueError if a method has no head, or its settings are not enough to fit one."""
    module = catalog.load(family, params.name)
    if not hasattr(module, "fit"):
        raise ValueError(f"{family} {params.name} has no head that could be fit to a draft")
    keys = [key for key in type(params).model_fields if key not in (*module.FITS, "name")]
    require_unsaid(params, keys, params.name, "fitting its head reads others; set it in [engine]")
    if hasattr(module, "require_fit"):
        module.require_fit(params)


def share(samples: Sequence[Sample], methods: Sequence[tuple[str, BaseParams]]) -> tuple[list[Sample], list[Sample]]:
    """Return answers to train a draft on, and others to fit heads on; without heads the draft gets all.

    Raises:
        ValueError: there are too few answers to keep one for the heads.
    """
    if not methods:
        return list(samples), []
    kept = list(samples[EVERY - 1 :: EVERY])
    if not kept:
        raise ValueError(f"a head is fit on one answer in {EVERY} that its draft never learns; got {len(samples)}")
    return [sample for number, sample in enumerate(samples) if (number + 1) % EVERY], kept


def fit(
    methods: Sequence[tuple[str, BaseParams]],
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    num_draft_tokens: int,
    directory: Path,
    work_dir: Path,
    seed: int,
) -> None:
    """Fit heads to a trained draft, on the processor, and keep them in its directory; ValueError where one can't be.

    `methods` are family and settings of each, `samples` greedy answers that the draft was not trained on.
    """
    for family, params in methods:
        module, work = catalog.load(family, params.name), work_dir / FOLDER / params.name
        work.mkdir(parents=True, exist_ok=True)
        module.fit(draft, target_dir, samples, num_draft_tokens, work, params, seed)
        (directory / FOLDER).mkdir(exist_ok=True)
        (work / module.FILE).replace(directory / FOLDER / module.FILE)


def found(family: str, params: BaseParams, directory: Path | None) -> BaseParams:
    """Return a method's settings, with the head that a draft's directory, if any, keeps for it unless they name one."""
    module = catalog.load(family, params.name)
    if directory is None or not hasattr(module, "FILE") or getattr(params, "head", None) is not None:
        return params
    file = directory / FOLDER / module.FILE
    return params.model_copy(update={"head": file}) if file.is_file() else params
