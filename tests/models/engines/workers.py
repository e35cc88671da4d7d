"""Workers of vLLM that fail, count or compute in a way that tests need. No recipe may name one."""

from typing import Any

from models.engines.vllm.worker import DraftWorker


class UnfixedWorker(DraftWorker):
    """As redraft's, but for what `patches.install` does before the model is loaded: what vLLM does as shipped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super(DraftWorker, self).__init__(*args, **options)
