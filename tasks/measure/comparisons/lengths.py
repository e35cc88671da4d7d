"""How many tokens each length policy drafts of one draft's, and what comes of it.

All of them may draft up to `LIMIT` tokens, and see from row to row what steps take: costs are learnt anew in each, as
steps are decoded. A chain is drafted but where a policy chooses the size of a tree.
"""

from models import catalog
from tasks.measure import decoding
from tasks.measure.comparisons import Row

QUESTION = "Which length policy drafts as many tokens as pay?"
LIMIT, SHORTER = 8, (1, 3)
BASELINE = f"fixed, at most {LIMIT}"
COLUMNS = decoding.COLUMNS
TIMED = True
TREES = {"hardware_aware": "sequoia"}  # what it chooses the size of


def rows(budget: float) -> list[Row]:
    """Return every policy, and fixed lengths below; `budget` scales the prompts, 1 being 6 answers of 32 tokens."""
    ways = [(name, LIMIT) for name in catalog.names("lengths")] + [("fixed", number) for number in SHORTER]
    trees = {name: {"name": TREES.get(name, "chain")} for name, _ in ways}
    return [
        Row(
            f"{name}, at most {number}",
            {"engine": {"lengths": {"name": name}, "trees": trees[name], "num_draft_tokens": number}},
        )
        for name, number in ways
    ]


measure = decoding.measure
