"""How the time of a computation grows, told from two sizes in one run: no machine is too slow for that."""

import time
from collections.abc import Callable

ATTEMPTS = 5
MOST = 8.0  # of what is four times as large: linear growth is 4, quadratic growth 16


def grows_linearly(small: Callable[[], object], large: Callable[[], object]) -> bool:
    """Return whether `large`, which has four times as much to do as `small`, takes less than eight times as long.

    What else the machine does lengthens one or the other, so the two are measured again where they seem not to.
    """
    return any(time_s(large) < MOST * max(time_s(small) for _ in range(2)) for _ in range(ATTEMPTS))


def time_s(work: Callable[[], object]) -> float:
    """Return the processor time that `work` takes."""
    started_s = time.process_time()
    work()
    return time.process_time() - started_s
