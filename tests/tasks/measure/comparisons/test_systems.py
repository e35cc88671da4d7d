"""The table of systems: every method is studied, and its paper's claim ends with a verdict."""

import math
from pathlib import Path

import pytest

from infra.views.comparison import Comparison, MethodFigure
from infra.views.results import Report
from models import catalog
from models.targets import random, target_config
from tasks.measure.comparisons import Row, systems
from tasks.measure.comparisons.systems import DEVICES, _decoder, part_times
from tests.tasks.measure.benches import bench_of

EMPTY = Report(figures={}, grids=[])


def found(shape: float | None) -> Comparison:
    figures = {name: MethodFigure(value=value) for name, value in (("gain", 2.0), ("kept", 1.0), ("shape", shape))}
    return Comparison(
        question="", baseline="", headings=systems.COLUMNS, figures={"flover": figures}, seconds={}, num_seeds=2
    )


def test_every_method_says_what_its_paper_claims() -> None:
    for method in (catalog.load("systems", name) for name in catalog.names("systems")):
        assert all(getattr(method, key) for key in ("PAPER", "CLAIM", "GAIN", "KEPT", "SHAPE"))
        assert isinstance(method.NEEDS, str)


@pytest.mark.slow
@pytest.mark.parametrize("row", systems.rows(1.0)[1:], ids=lambda row: row.name)
def test_a_row_is_studied(row: Row, tiny_target: Path, tmp_path: Path) -> None:
    seen = systems.measure(bench_of(tiny_target, tmp_path), row, seed=0)
    assert seen.keys() == systems.COLUMNS.keys()
    assert seen["gain"] > 0 and seen["shape"] in (0, 1)


def test_the_plain_way_gains_nothing(tiny_target: Path, tmp_path: Path) -> None:
    seen = systems.measure(bench_of(tiny_target, tmp_path), systems.rows(1.0)[0], seed=0)
    assert (seen["gain"], seen["kept"]) == (1, 1) and math.isnan(seen["shape"])


@pytest.mark.parametrize(
    ("shape", "said"), [(1.0, "reproduced in shape"), (0.0, "refuted"), (0.5, "open: seen under 50% of the seeds")]
)
def test_a_claim_ends_with_a_verdict(shape: float, said: str) -> None:
    report = systems.claims(EMPTY, found(shape))
    (grid,) = report.grids
    assert grid.rows[0][0] == "flover" and "2×" in grid.rows[0][3] and grid.rows[0][-1] == said


def test_a_row_without_a_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="flover says nothing of its shape"):
        systems.claims(EMPTY, found(None))


def test_all_parts_are_timed(tiny_target: Path) -> None:
    times = part_times(tiny_target)
    assert set(times.attention_ms) == set(times.mlp_ms) == set(DEVICES)
    assert times.rest_ms > 0 and times.meet_ms > 0
    line = times.cost.line(1)
    assert line is not None and line.target_ms(1) > 0


def test_a_device_holds_whole_heads_and_the_fullest_one_counts(tmp_path: Path) -> None:
    random.build(random.Params(num_heads=6, num_kv_heads=3), tmp_path)
    config = target_config(tmp_path)
    parts = [_decoder(config, number) for number in DEVICES]
    assert [(part.num_heads, part.num_kv_heads, part.head_dim) for part in parts] == [
        (6, 3, 64),
        (4, 2, 64),
        (2, 1, 64),
        (2, 1, 64),
    ]
