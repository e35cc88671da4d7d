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
from typing import Annotated

from pydantic import ValidationInfo, field_validator

from models import catalog
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.params import BaseParams, require_unsaid

FOLDER = "heads"
EVERY = 8  # one answer in so many is kept from the draft, for the heads


class WithHeads(BaseParams):
    """Which heads are fit behind a draft's training.

    Attributes:
        lengths: a length policy with a head, such as `specdec_pp`, that is fit to the draft on answers kept from it,
            and that the reference engine finds beside the draft, where [engine] names it too.
        verify: a rule with a head, such as `judge`, the same.
    """

    lengths: Annotated[BaseParams | None, catalog.Method("lengths")] = None
    verify: Annotated[BaseParams | None, catalog.Method("verify")] = None

    @field_validator("lengths", "verify")
    @classmethod
    def _has_a_head(cls, method: BaseParams | None, info: ValidationInfo) -> BaseParams | None:
        return require(str(info.field_name), method)

    @property
    def heads(self) -> list[tuple[str, BaseParams]]:
        """Family and settings of each."""
        both = {"lengths": self.lengths, "verify": self.verify}
        return [(family, params) for family, params in both.items() if params is not None]


def require(family: str, params: BaseParams | None) -> BaseParams | None:
    """Return settings that a head can be fit with, or None.

    Raises:
        ValueError: the method has no head, or its settings are not enough to fit one.
    """
    if params is None:
        return None
    module = catalog.load(family, params.name)
    if not hasattr(module, "fit"):
        raise ValueError(f"{family} {params.name} has no head that could be fit to a draft")
    keys = [key for key in type(params).model_fields if key not in (*module.FITS, "name")]
    require_unsaid(params, keys, params.name, "fitting its head reads others; set it in [engine]")
    if hasattr(module, "require_fit"):
        module.require_fit(params)
    return params


def share(samples: Sequence[Sample], methods: Sequence[tuple[str, BaseParams]]) -> tuple[list[Sample], list[Sample]]:
    """Return answers to train a draft on, and others to fit heads on; without heads the draft gets all.

    Too few answers to keep one for the heads are a ValueError.
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
    """Fit heads to a draft that is trained, and keep them in its directory.

    Args:
        methods: family and settings of each.
        draft: on the processor; it stays as it is.
        target_dir: its target.
        samples: greedy answers that the draft was not trained on.
        num_draft_tokens: K as served.
        directory: the draft's.
        work_dir: for what is needed on the way.
        seed: of the heads' first weights.

    Raises:
        ValueError: a method can't be fit to that.
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
