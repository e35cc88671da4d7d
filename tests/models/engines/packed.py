"""A worker whose products of few rows read integers, its draft's too: on weights so few it is chance what is faster."""

from typing import Any

from models.engines.vllm.patches import small_batch_gemm
from models.engines.vllm.worker import DraftWorker, answering


class PackedWorker(DraftWorker):
    """As redraft's, and it tells whether its draft's passes are one call."""

    def __init__(self, *args: Any, **options: Any) -> None:
        small_batch_gemm._Target._seconds = lambda _, rows, limit: 0.0 if limit else 1.0  # type: ignore[method-assign]
        super().__init__(*args, **options)

    @answering
    def drafts_in_one_call(self) -> bool:
        """Return whether any proposal was."""
        return self.planned is not None and self.planned._fused is not None and bool(self.planned._fused._told)
