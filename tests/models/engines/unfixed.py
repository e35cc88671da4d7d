"""A worker extension that does not install redraft's kernel: what vLLM does as shipped."""

from typing import Any


class UnfixedWorker:
    """Adds to vLLM's worker only what an engine asks at its start."""

    model_runner: Any

    def runner(self) -> dict[str, str]:
        """Return the class of the model runner."""
        return {"value": type(self.model_runner).__name__}
