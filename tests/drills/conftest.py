"""Drills start from the same finished tiny build as the flows' tests."""

from tests.flows.conftest import built, cli_in, home, orchestrator, rows

__all__ = ["built", "cli_in", "home", "orchestrator", "rows"]
