"""How much of a refresh one API key may be, and how long a refresh waits for rows of others.

Rows are shared out by water-filling: each key gives all its rows up to the highest level at which no key has more than
its share of what is kept. Where that keeps fewer rows than a refresh wants, it waits for rows of others, for a bounded
time, since who asks once must not stop everybody's drafts. What is lacking then is filled up by raising the level:
above its share is a key only where every row of those below the level is in, and no more than the smallest refresh
takes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from infra.querylog import QueryLog
from models.recipe import Refresh


class ForOthers(NamedTuple):
    """How many of the rows that wait are within each key's share, and until when, in Unix time, more are waited for."""

    within: int
    until_ms: int


def rows_of_others(log: QueryLog, refresh: Refresh, at_ms: int) -> ForOthers | None:
    """Return what a refresh waits for though enough rows are there, None if for nothing.

    It waits while the rows within each key's share are too few, up to `share_wait_s` after the first one was served. A
    key that is alone has no share to keep to. A clock that is set back ends the wait.
    """
    of_key, first_ms = log.waiting_keys(refresh.max_rows)
    if first_ms is None or of_key.total() < refresh.min_rows:
        return None
    cap = cap_per_key([*of_key.values()], refresh.max_share_per_key)
    within = sum(min(number, cap) for number in of_key.values())
    wait_ms = int(refresh.share_wait_s * 1000)
    if within >= refresh.min_rows or not 0 <= at_ms - first_ms < wait_ms:
        return None
    return ForOthers(within, first_ms + wait_ms)


def cap_per_key(sizes: Sequence[int], max_share: float, min_rows: int = 0) -> int:
    """Return how many rows a key may give: the largest c with c <= max_share * kept(c), kept(c) = sum of min(n_k, c).

    A share of less than one key's equal part, 1 over the number of keys, can't be kept to and means that part. Two keys
    of 600 and 1 rows would leave 2 at half each. So c is at least what keeps `min_rows`, or all rows if they are fewer;
    whoever is below it has given all.
    """
    if not sizes:
        return 0
    caps = range(max(sizes) + 1)

    def kept(cap: int) -> int:
        return sum(min(size, cap) for size in sizes)

    def is_above(cap: int) -> bool:
        return cap > max(max_share * kept(cap), kept(cap) / len(sizes))

    # share * kept(c) - c is concave and 0 at 0, so it turns negative once; kept(c) only grows.
    within_share = bisect_left(caps, True, key=is_above) - 1
    return max(within_share, bisect_left(caps, min(min_rows, sum(sizes)), key=kept))
