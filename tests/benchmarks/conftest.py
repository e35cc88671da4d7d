"""Benchmarks start from the same finished tiny build as the flows' tests."""

from tests.flows.conftest import built, cli_in, orchestrator, rows, target_dir

__all__ = ["built", "cli_in", "orchestrator", "rows", "target_dir"]
