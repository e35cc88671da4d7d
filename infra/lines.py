"""A draft's line of parents, and the challengers of a champion, as the lineage of versions tells them.

A line starts with a draft that was trained from nothing. A draft's `parent` is the champion that it was trained from;
the registry's own `previous` is the champion that it replaced. A challenger is one or more checkpoints, one a window,
each of which `continues` the one before; all challengers of a champion share one error budget.

A past champion that is tried again is a version of its own: its parent is the one whose weights it has, and it was
gated against the champion of the day. So a line tells what a draft was trained on, and `predecessors` whom it had to
beat.
"""

from collections.abc import Sequence

from infra.registry import Registry
from infra.versions import Version, is_quarantined, is_usable
from infra.windows import Window


def ancestors(registry: Registry, version: Version) -> list[Version]:
    line = [version]
    while (parent := line[-1].lineage.parent) is not None:
        line.append(registry.get("draft", parent))
    return line


def predecessors(registry: Registry, version: Version) -> list[Version]:
    """Return a draft, the champions that it was trained from or gated against, and theirs, newest first."""
    found, waiting = {version.number: version}, [version]
    while waiting:
        lineage = waiting.pop().lineage
        for number in (lineage.parent, lineage.gate_champion):
            if number is not None and number not in found:
                found[number] = registry.get("draft", number)
                waiting.append(found[number])
    return [found[number] for number in sorted(found, reverse=True)]


def past_champions(
    versions: Sequence[Version], champion: Version, domain: str, num_draft_tokens: int, window: Window
) -> list[Version]:
    """Return the drafts that served before the champion and may serve again, the best in a domain first.

    One was replaced by another draft, is of the same target and K, its files were never found bad, in whichever
    version, and are not the champion's. None that was trained on rows of the window counts: it is gated by what it
    never saw.

    Versions are newest first. The order is by τ, each at the gate of its own time; unknown ones come last.
    """
    replaced = {one.previous for one in versions}
    seen = ((one, one.lineage.window) for one in versions)
    out = {one.sha256 for one, rows in seen if is_quarantined(one) or (rows and rows.last_seq >= window.first_seq)}
    found: dict[str, Version] = {}
    for one in versions:
        fits = one.target.sha256 == champion.target.sha256 and one.lineage.num_draft_tokens == num_draft_tokens
        if one.number in replaced and fits and not one.cleaned and one.sha256 not in {*out, champion.sha256}:
            found.setdefault(one.sha256, one)
    return sorted(found.values(), key=lambda one: (one.lineage.tau.get(domain, 0.0), one.number), reverse=True)


def tried_again(versions: Sequence[Version], champion: int, domain: str) -> Version | None:
    """Return the past draft that was held against a champion, by its number, to return for a domain, if one was."""
    found = (one for one in versions if one.lineage.gate_champion == champion)
    return next((one for one in found if one.lineage.returns_for == domain), None)


def best_versions(line: Sequence[Version]) -> dict[str, Version]:
    """Return domain to the version of a line that was best there; of equals, the newest."""
    best: dict[str, Version] = {}
    for version in line:
        for domain, tau in version.lineage.tau.items():
            if domain not in best or tau > best[domain].lineage.tau[domain]:
                best[domain] = version
    return best


def challenger_to_go_on(versions: Sequence[Version], champion: int, first_seq: int) -> Version | None:
    """Return the checkpoint that the training on the next rows resumes, None where it starts from the champion.

    It is the champion's last challenger, if its gate was left undecided; not one of the same rows, from `first_seq` on,
    of which some were erased since. Versions are newest first.
    """
    found = ((one, one.lineage.window) for one in versions if one.lineage.parent == champion)
    last = next((one for one, seen in found if seen and seen.last_seq < first_seq), None)
    return None if last is None or last.lineage.gate != "undecided" or not is_usable(last) else last


def next_challenger(versions: Sequence[Version], champion: int) -> int:
    """Return which challenger of a champion the next new one is, from 1; refused ones and those from elsewhere too."""
    numbers = (one.lineage.gate_test for one in versions if one.lineage.gate_champion == champion)
    return 1 + max(numbers, default=0)


def trained_on(versions: Sequence[Version], window: Window) -> list[Version]:
    wanted = (window.first_seq, window.last_seq, window.sha256)
    found = [(version, version.lineage.window) for version in versions]
    return [version for version, seen in found if seen and (seen.first_seq, seen.last_seq, seen.sha256) == wanted]
