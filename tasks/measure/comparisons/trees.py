"""What each tree is accepted for and what it takes, in one draft's proposals for one target.

Budgets are nodes of a step. Passes of the draft are what a tree asks it for: a level each, but for trees that look at
what it said before they go on.
"""

from models import catalog
from tasks.measure import decoding
from tasks.measure.comparisons import Row

QUESTION = "Which tree of drafted tokens has most accepted, and which pays on this machine?"
BASELINE = "chain, 4 tokens"
COLUMNS = decoding.COLUMNS
TIMED = True
NUM_TOKENS = (4, 12)


def rows(budget: float) -> list[Row]:
    """Return every tree at every size; `budget` scales the prompts, 1 being 6 answers of 32 tokens."""
    return [
        Row(f"{name}, {number} tokens", {"engine": {"trees": {"name": name}, "num_draft_tokens": number}})
        for number in NUM_TOKENS
        for name in catalog.names("trees")
    ]


measure = decoding.measure
