"""Always K tokens of the head, and whatever look-up finds."""

from collections.abc import Sequence
from typing import Literal

from models.core.throughput.cost import Cost
from models.core.throughput.running import MATCHES, NUM_PLACES, Acceptance, Source
from models.lengths import Plan, SequenceState, all_tokens
from models.params import BaseParams

PAPER = "arXiv:2211.17192, section 3"


class Params(BaseParams):
    """Nothing to set; K is the engine's."""

    name: Literal["fixed"] = "fixed"


num_draft_tokens = all_tokens


def plan(
    cost: Cost,
    acceptance: Acceptance,
    running: Sequence[SequenceState],
    limit: int,
    before: Plan | None,
    params: Params,
) -> Plan:
    """Draft as many tokens in each step, whatever they cost; what was looked up goes before the head's."""
    kinds = range(len(MATCHES) + 1)
    longest: dict[tuple[str, Source, int], int] = {
        (sequence.domain, "lookup", kind): NUM_PLACES for sequence in running for kind in kinds
    }
    return Plan(limit, longest=longest, settled=limit, why="fixed")
