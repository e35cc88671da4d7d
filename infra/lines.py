"""A draft's line of parents, and the challengers of a champion, as the lineage of versions tells them.

A line starts with a draft that was trained from nothing. A draft's `parent` is the champion that it was trained from;
the registry's own `previous` is the champion that it replaced. A challenger is one or more snapshots, one a window, of
which each `continues` the one before; all challengers of a champion share one error budget.
"""

from collections.abc import Sequence

from infra.registry import Registry, Version, is_quarantined
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


def challenger_to_go_on(versions: Sequence[Version], champion: int, window: Window) -> Version | None:
    """Return the snapshot that the training on a window goes on from, None where it starts from the champion.

    It is the champion's last challenger, if its gate was left undecided. One that was shown worse or quarantined is
    not gone on with; nor is one that passed and does not serve, because somebody took it back.

    Args:
        versions: newest first.
        champion: the champion's number.
        window: what is to be trained on. A snapshot of the same rows, of which some were erased since, does not count.
    """
    found = ((one, one.lineage.window) for one in versions if one.lineage.parent == champion)
    last = next((one for one, seen in found if seen and seen.last_seq < window.first_seq), None)
    return None if last is None or last.lineage.gate != "undecided" or is_quarantined(last) else last


def next_challenger(versions: Sequence[Version], champion: int) -> int:
    """Return which challenger of a champion the next new one is, from 1; refused ones and those from elsewhere too."""
    judged = (one.lineage.gate_test for one in versions if one.lineage.judged_against == champion)
    return 1 + max(judged, default=0)


def trained_on(versions: Sequence[Version], window: Window) -> list[Version]:
    """Return the versions that were trained on a window, newest first."""
    wanted = (window.first_seq, window.last_seq, window.sha256)
    found = [(version, version.lineage.window) for version in versions]
    return [version for version, seen in found if seen and (seen.first_seq, seen.last_seq, seen.sha256) == wanted]
