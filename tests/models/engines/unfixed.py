"""A worker extension that does not install redraft's kernel: what vLLM does as shipped."""


class UnfixedWorker:
    """Nothing is added to vLLM's worker."""
