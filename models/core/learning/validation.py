"""Answers kept from a draft that say after each pass over the others how good it is, and when another pass is no use.

What is asked of it is what serving and the gate count: tokens a step of the target, on answers of which it learnt
nothing. The loss would be a worse judge, since it rises where a draft is only too sure of what it says. As soon as
`patience` passes were no better than the best before them, training ends and the draft is as after that one. So a
window's size and what there is to learn of it decide how many steps it gets, and `num_epochs` is only the most.

A run of these may be killed anywhere: what the best pass left is written before the checkpoint that names it.
"""

import hashlib
import shutil
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from models.core.evaluation import scoring
from models.core.learning.hidden import Sample
from models.core.learning.loop import ALONE, Loop, Workers
from models.drafts import Draft
from models.types import MIN_COMPLETION

FOLDER = "looked-at"


def split(
    samples: Sequence[Sample], share: float, seed: int, among: Collection[str] | None = None
) -> tuple[list[Sample], list[Sample]]:
    """Return answers to learn and others to validate with, in the order given; no cluster is on both sides.

    Clusters are drawn as long as they fit into their domain's share, which is of one answer at least; a cluster of
    several domains counts for the one of its first answer. An answer without one is a cluster of its own.

    `share` is of each domain's answers, in [0, 0.5]; a cluster with an answer that is not `among` the ids that may be
    validated with is learnt, None allowing all.
    """
    clusters: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        clusters[sample.cluster or f"id {sample.id}"].append(sample)
    sizes, taken = Counter(sample.domain for sample in samples), Counter[str]()
    most = {domain: max(1, round(share * size)) for domain, size in sizes.items() if share and size > 1}
    kept: set[str] = set()
    for name in sorted(clusters, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest()):
        members, domain = clusters[name], clusters[name][0].domain
        is_unseen = among is None or all(member.id in among for member in members)
        if is_unseen and taken[domain] + len(members) <= most.get(domain, 0):
            taken[domain] += len(members)
            kept.update(member.id for member in members)
    return [one for one in samples if one.id not in kept], [one for one in samples if one.id in kept]


class Validation:
    """The looks of one run.

    Attributes:
        samples: what is looked at; where there are none no look is due, and nothing is put back.
        taus: (steps done, tokens a step of the target) of each look.
    """

    def __init__(
        self,
        draft: Draft,
        target_dir: Path,
        samples: Sequence[Sample],
        num_draft_tokens: int,
        patience: int,
        steps_per_pass: int,
        work_dir: Path,
    ) -> None:
        """Take the draft that learns, on its device, and samples that it does not learn; `patience` is in passes."""
        self.samples = [one for one in samples if len(one.completion_ids) >= MIN_COMPLETION]
        self.taus: list[tuple[int, float]] = []
        self._draft, self._target_dir, self._num_draft_tokens = draft, target_dir, num_draft_tokens
        self._patience, self._steps_per_pass, self._work_dir = patience, steps_per_pass, work_dir

    @property
    def best(self) -> tuple[int, float] | None:
        """The first of the best looks."""
        return max(self.taus, key=lambda look: look[1], default=None)

    @property
    def is_over(self) -> bool:
        """Whether as many looks as there is patience for were no better than one before them."""
        return self.best is not None and len(self.taus) - 1 - self.taus.index(self.best) >= self._patience

    def is_due(self, step: int, at_end: bool = False) -> bool:
        """Return whether the draft is to be looked at after so many steps: behind each pass, and at the run's end."""
        if not self.samples or (self.taus and self.taus[-1][0] == step):
            return False
        return step > 0 and (at_end or step % self._steps_per_pass == 0)

    def place(self, step: int) -> float:
        """Return the share of its pass that is over after so many steps, in (0, 1]."""
        return 1 - (-step % self._steps_per_pass) / self._steps_per_pass

    def look(self, step: int, workers: Workers = ALONE) -> bool:
        """Find out how good the draft is now; return whether it was never better. The first of the workers looks."""
        tau = 1.0
        if workers.is_first:
            scored = self._draft, self._target_dir, self.samples, self._num_draft_tokens, self._work_dir
            scores = scoring.score(*scored, str(self._draft.vocabulary.device))
            tau += sum(one.accepted for one in scores) / sum(one.steps for one in scores)
        self.taus.append((step, workers.agree(tau)[0]))
        return self.best == self.taus[-1]

    def keep(self, run: Loop[Any], progress: Mapping[str, Any]) -> None:
        """Write what the pass left that was looked at last; see `Loop.keep`."""
        folder = self._folder(self.taus[-1][0])
        folder.mkdir(parents=True, exist_ok=True)
        run.keep(folder, progress)

    def put_back(self, run: Loop[Any]) -> dict[str, Any] | None:
        """Put back what the best pass left and return what `keep` was told, unless it was the last.

        Raises:
            FileNotFoundError: somebody removed it.
        """
        if self.best is None or self.best == self.taus[-1]:
            return None
        folder = self._folder(self.best[0])
        if (found := run.take_back(folder)) is None:
            raise FileNotFoundError(f"{folder}: the best pass's weights are gone")
        return found

    def forget_others(self) -> None:
        """Remove what other passes than the best left, once no checkpoint names them."""
        best = None if self.best is None else self._folder(self.best[0])
        for folder in self._work_dir.glob(f"{FOLDER}-*"):
            if folder != best:
                shutil.rmtree(folder)

    def _folder(self, step: int) -> Path:
        return self._work_dir / f"{FOLDER}-{step}"
