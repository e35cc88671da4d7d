"""What drafts of each trained family are accepted for after the same steps on the same answers.

Each is new, of its family's default shape, and is trained as its paper says (`tasks.measure.lesson`): loss, rows and
weights of steps are its own, the learning rate and the number of steps are the same. Chains of K tokens are scored;
trees and speed, to which families come in different ways, are for `redraft bench specbench`, which takes their
directories.
"""

from models import catalog
from models.drafts import family_named
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, Row

QUESTION = "Which family of drafts learns most, at equal steps on the same answers?"
BASELINE = "eagle3"
COLUMNS = {**lesson.COLUMNS, "parameters_m": "trained parameters, million ↓"}


def rows(budget: float) -> list[Row]:
    """Return every family that is trained; `budget` scales the answers that are learnt, 1 being 96 of 48 tokens."""
    trained = [name for name in catalog.names("drafts") if family_named(name).TRAINED]
    return [Row(name, {"draft": {"name": name}, "training": lesson.TRAINING}) for name in trained]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """Train one draft; see `tasks.measure.comparisons`."""
    learnt = lesson.teach(bench, row.settings["draft"], row.settings["training"], seed)
    return {**learnt.figures, "parameters_m": learnt.num_parameters / 1e6}
