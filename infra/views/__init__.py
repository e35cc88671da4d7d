"""Views: what people are shown, of typed plain data. Charts, the report, gate reports, tables of results.

A view asks nobody and computes nothing that it does not show. What it is given is defined here, so that commands, tasks
and services can all fill it.
"""

from collections.abc import Mapping

MEANING = "τ is the mean accepted length, 1 + accepted draft tokens / verification steps"


def taus_in_words(taus: Mapping[str, float]) -> str:
    """Return domains with their τ, one after the other."""
    return ", ".join(f"{domain} {tau:.2f}" for domain, tau in taus.items())
