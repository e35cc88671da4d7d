"""Workers of vLLM that fail, count or compute in a way that tests need. No recipe may name one."""

from collections import Counter
from functools import wraps
from typing import Any

from models.engines.vllm.patches import small_batch_gemm
from models.engines.vllm.worker import DraftWorker, answering


class UnfixedWorker(DraftWorker):
    """As redraft's, but for what `patches.install` does before the model is loaded: what vLLM does as shipped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super(DraftWorker, self).__init__(*args, **options)


class PackedWorker(DraftWorker):
    """Its products of few rows read integers, its draft's too: on weights so few it is chance what is faster."""

    def __init__(self, *args: Any, **options: Any) -> None:
        small_batch_gemm._Target._seconds = lambda _, rows, limit: 0.0 if limit else 1.0  # type: ignore[method-assign]
        super().__init__(*args, **options)

    @answering
    def drafts_in_one_call(self) -> bool:
        """Return whether any proposal was."""
        return self.planned is not None and self.planned._fused is not None and bool(self.planned._fused._told)


class CountingWorker(DraftWorker):
    """As redraft's, and it counts what is done for a draft."""

    @answering
    def count(self) -> dict[str, int]:
        """Return what was done since it was asked before; the first time it begins to count."""
        runner: Any = self.model_runner
        if "counts" not in self.__dict__:
            self.counts: Counter[str] = Counter()
            self._counted(runner, "_model_forward", "steps")
            self._counted(runner, "_calc_spec_decode_metadata", "prepared")
            self._counted(runner.rejection_sampler, "forward", "verified")
            self._counted(runner, "propose_draft_token_ids", "asked to draft")
            self._counted(runner.drafter.model, "combine_hidden_states", "read states")
        counts = dict(self.counts)
        self.counts.clear()
        return counts

    def _counted(self, owner: Any, name: str, what: str) -> None:
        own = getattr(owner, name)

        @wraps(own)
        def counted(*args: Any, **options: Any) -> Any:
            self.counts[what] += 1
            return own(*args, **options)

        setattr(owner, name, counted)
