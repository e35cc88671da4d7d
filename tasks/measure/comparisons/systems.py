"""What each way to run models on several requests or devices gains, held against what its paper claims.

Prompts are the beginnings of held-out documents that the seed draws, answers are greedy, in float32. A method runs the
plain way and its own on the same work; where that takes devices that are not here, it counts with times that are
measured part by part. `claims` prints what each paper says beside what was seen.
"""

import math

import torch

from infra.views.comparison import Comparison, number
from infra.views.results import Grid, Report
from models import catalog, systems
from models.layers.wide import WideDecoder
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, Row
from tasks.measure.part_times import part_times

QUESTION = "Which claims about running models on several requests or devices hold, as far as this machine can tell?"
BASELINE = "the plain way"
TIMED = True
COLUMNS = {
    "gain": "plain way / method, × ↑",
    "kept": "kept of the plain way's output, share ↑",
    "shape": "the claim's shape was seen, share of seeds ↑",
}
NUM_PROMPTS, ANSWER_LENGTH = 4, 24


def rows(budget: float) -> list[Row]:
    """Return every method; `budget` scales the answers, 1 being 24 tokens to each of 4 prompts."""
    return [Row(BASELINE, {}), *(Row(name, {"method": {"name": name}}) for name in catalog.names("systems"))]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    """Study one method; the plain way is what all are divided by."""
    if row.name == BASELINE:
        return {"gain": 1.0, "kept": 1.0, "shape": math.nan}
    method = catalog.load("systems", row.settings["method"]["name"])
    decoder = WideDecoder.load(bench.target_dir, torch.float32)
    prompts = lesson.opening(bench.held_out, NUM_PROMPTS, seed)
    given = systems.Given(decoder, prompts, max(4, round(ANSWER_LENGTH * bench.budget)), part_times(bench.target_dir))
    seen: systems.Seen = method.study(given, torch.Generator().manual_seed(seed))
    return {"gain": seen.gain, "kept": seen.kept, "shape": float(seen.holds)}


def claims(report: Report, found: Comparison) -> Report:
    """Put each paper's claim beside what was seen, and say what became of it."""
    lines = []
    for name, figures in found.figures.items():
        if name == BASELINE:
            continue
        method = catalog.load("systems", name)
        held = figures["shape"].value
        if held is None:
            raise ValueError(f"{name} says nothing of its shape")
        seen = f"{number(figures['gain'].value)}× in {method.GAIN}; {number(figures['kept'].value)} of {method.KEPT}"
        said = systems.verdict(held, method.NEEDS)
        lines.append([name, f"{method.CLAIM} ({method.PAPER})", method.SHAPE, seen, said])
    grid = Grid("claims", ["method", "the paper", "its shape", "seen", "verdict"], lines)
    figures = report.figures | {"claims": {line[0]: line[-1] for line in lines}}
    return report.model_copy(update={"figures": figures, "grids": [*report.grids, grid]})
