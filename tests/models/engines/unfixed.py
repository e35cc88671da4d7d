"""A worker in which nothing of vLLM's inside is changed before its model is loaded: what vLLM does as shipped."""

from typing import Any

from models.engines.vllm.worker import DraftWorker


class UnfixedWorker(DraftWorker):
    """As redraft's, but for what `patches.install` does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super(DraftWorker, self).__init__(*args, **options)
