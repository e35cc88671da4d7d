"""A worker extension that does not install redraft's kernel: what vLLM does as shipped."""

from typing import Any

from models.drafting.lookup import Library
from models.engines.vllm import proposer


class UnfixedWorker:
    """Adds to vLLM's worker only what an engine asks at its start."""

    model_runner: Any

    def runner(self) -> dict[str, str]:
        """Return the class of the model runner."""
        return {"value": type(self.model_runner).__name__}

    def few_rows(self) -> dict[str, int]:
        """Return up to how many rows products read a grid: vLLM's own read none."""
        return {"value": 0}

    def follow_plans(self) -> dict[str, None]:
        """Let the draft follow the scheduler's plans, as redraft's own extension does."""
        proposer.install(self.model_runner, Library(shortest=3, longest=16, capacity=0))
        return {"value": None}
