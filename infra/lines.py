"""A draft's line of parents, as the lineage of its versions tells it.

A line starts with a draft that was trained from nothing. Its `parent` is
the version that a draft was trained from; the registry's own `previous` is the champion that it replaced.
"""

from collections.abc import Sequence

from infra.registry import Registry, Version
from infra.windows import Window


def ancestors(registry: Registry, version: Version) -> list[Version]:
    """Return a draft and its parents, newest first."""
    line = [version]
    while (parent := line[-1].lineage.parent) is not None:
        line.append(registry.get("draft", parent))
    return line


def best_versions(line: Sequence[Version]) -> dict[str, Version]:
    """Return domain to the version of a line that was best there; of equals, the newest."""
    best: dict[str, Version] = {}
    for version in line:
        for domain, tau in version.lineage.tau.items():
            if domain not in best or tau > best[domain].lineage.tau[domain]:
                best[domain] = version
    return best


def next_challenger(versions: Sequence[Version], champion: int) -> int:
    """Return which challenger of a champion the next one is, from 1; those that were refused count too."""
    tested = (version.lineage for version in versions)
    return 1 + max((one.gate_test for one in tested if champion in (one.parent, one.gated_against)), default=0)


def trained_on(versions: Sequence[Version], window: Window) -> list[Version]:
    """Return the versions that were trained on a window, newest first."""
    wanted = (window.first_seq, window.last_seq, window.sha256)
    found = [(version, version.lineage.window) for version in versions]
    return [version for version, seen in found if seen and (seen.first_seq, seen.last_seq, seen.sha256) == wanted]
