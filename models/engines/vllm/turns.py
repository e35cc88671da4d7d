"""Which steps an engine is measured by: how many sequences, and what each step does with them. Imports no vLLM."""

from typing import NamedTuple

# Numbers of sequences whose steps are measured, beside the most that the engine runs, and how often each kind of step
# takes its turn. Steps of many sequences vary less and take longer.
NUM_CYCLES = {1: 4, 2: 4, 4: 4, 8: 4, 16: 4, 32: 3, 64: 2, 128: 2}
# Sequences up to which many rows of each are measured; from there on a row takes as long as the one before it.
MANY_ROWS = 16
# Sequences up to which each number of rows is measured that few tokens give: products of few rows have kernels of their
# own (`few_rows`), so that a row more can take as long as all before it.
FEW_ROWS, FEW_TOKENS = 2, 4


class Turn(NamedTuple):
    """What a step does that measures: what it drafts is verified, or filled up, in the next one.

    Attributes:
        passes: makes K passes of the draft, of which nothing is verified.
        num_filled: sequences that the next step verifies tokens of.
        num_tokens: of each of them.
    """

    passes: bool = False
    num_filled: int = 0
    num_tokens: int = 0


def turns(num_sequences: int, num_tokens: int) -> list[Turn]:
    """Return the kinds of steps that take turns while it is measured, so that all meet what else the machine does.

    The first has passes and one row a sequence, the second neither more; then come steps with more rows. The first rows
    beyond one a sequence are the dearest: 4 beside 16 took 12 ms, and 16 26 (two cores of an AMD EPYC).

    Args:
        num_sequences: of each step.
        num_tokens: the most that is looked up for one of them.
    """
    turn, few = [Turn(passes=True)], num_sequences // 4
    turn += [Turn(num_filled=few, num_tokens=1)] if few else []
    many = max(1, num_tokens) if num_sequences <= MANY_ROWS else 1
    some = range(1, min(many, FEW_TOKENS) + 1) if num_sequences <= FEW_ROWS else ()
    return [*turn, *(Turn(False, num_sequences, num) for num in sorted({1, *some, many})), Turn()]


def cycles(most: int) -> dict[int, int]:
    """Return the numbers of sequences that an engine is measured with which runs so many at most, and their cycles."""
    most = min(most, max(NUM_CYCLES))
    fewer = {num: num_cycles for num, num_cycles in NUM_CYCLES.items() if num < most}
    return fewer | {most: next(num_cycles for num, num_cycles in NUM_CYCLES.items() if num >= most)}
