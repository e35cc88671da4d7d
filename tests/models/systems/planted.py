"""Times of parts that are easy to reckon with."""

from models.systems import Times
from models.throughput.cost import Cost, Time


def times(
    attention_ms: dict[int, float], mlp_ms: dict[int, float], rest_ms: float, meet_ms: float, row_ms: float = 0.0
) -> Times:
    """Return times whose whole pass takes its parts' at one row, and so much more for each further row."""
    one = attention_ms[1] + mlp_ms[1] + rest_ms
    cost = Cost.measured([Time(1, rows, 0, one + (rows - 1) * row_ms) for rows in (1, 2, 16)])
    return Times(cost, attention_ms, mlp_ms, rest_ms, meet_ms)


EASY = times({size: 8.0 / size for size in (1, 2, 3, 4)}, {size: 8.0 / size for size in (1, 2, 3, 4)}, 0.0, 0.0)
