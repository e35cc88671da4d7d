"""What drafts of each trained family are accepted for after the same steps on the same answers.

Each is new, of its family's default shape, and is trained as its paper says (`tasks.measure.lesson`): loss, rows and
weights of steps are its own, and so is the learning rate. Chains of K tokens are scored; trees and speed are for
`redraft bench specbench`.
"""

from models import catalog
from models.core.drafting.draft_families import family_named, is_trained
from tasks.measure import lesson, sweep
from tasks.measure.comparisons import Bench, Row

QUESTION = "Which family of drafts learns most, at equal steps on the same answers?"
BASELINE = "eagle3"
COLUMNS = {**lesson.COLUMNS, **sweep.COLUMNS, "parameters_m": "trained parameters, million ↓"}


def rows(budget: float) -> list[Row]:
    """Return every family that is trained; `budget` scales the answers that are learnt, 1 being 96 of 48 tokens."""
    trained = [name for name in catalog.names("drafts") if is_trained(family_named(name))]
    how = {**lesson.TRAINING, "learning_rate": lesson.LEARNING_RATE}
    return [Row(name, {"draft": {"name": name}, **how}) for name in trained]


tune = lesson.tune


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    draft, figures = lesson.teach(bench, row, seed)
    return {**figures, "parameters_m": sum(one.numel() for one in draft.parameters() if one.requires_grad) / 1e6}
