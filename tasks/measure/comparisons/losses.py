"""What a draft accepts after the same steps on the same answers, under each loss.

Every row trains a new EAGLE-3 head of one layer from one start, as `tasks.measure.lesson` says, at the learning rate
that suits its loss best. Losses that aim at what is kept should be ahead at temperature 1. A loss that reads what such
a head has not is not here.
"""

from models import catalog
from tasks.measure import lesson, sweep
from tasks.measure.comparisons import Bench, Row

QUESTION = "Which loss teaches a draft head most, at equal steps on the same answers?"
BASELINE = "forward_kl"
COLUMNS = {**lesson.COLUMNS, **sweep.COLUMNS}


def rows(budget: float) -> list[Row]:
    """Return every loss; `budget` scales the answers that are learnt, 1 being 96 of 48 tokens."""
    training = {"draft": lesson.HEAD, **lesson.TRAINING, "follow": "all", "learning_rate": lesson.LEARNING_RATE}
    return [Row(name, {"loss": {"name": name}, **training}) for name in catalog.names("losses")]


tune = lesson.tune


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    return lesson.teach(bench, row, seed)[1]
