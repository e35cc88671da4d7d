"""What is asked for is read, the fastest that keeps to it is chosen, and its recipe is one."""

import pytest

from infra.views.comparison import MethodFigure
from models.types import Estimate
from tasks.measure import fit
from tasks.measure.comparisons import all as comparison

WORDS = comparison.BOUNDS


def figure(value: float | None, reach: float = 0.0) -> MethodFigure:
    if value is None:
        return MethodFigure(value=None)
    return MethodFigure(value=value, interval=Estimate(value=value, low=value - reach, high=value + reach))


def row(mib: float, kl: float | None, speed: float, reach: float = 0.0) -> dict[str, MethodFigure]:
    return {"checkpoint_mib": figure(mib), "kl": figure(kl, reach), "one_stream": figure(speed, 1.0)}


ROWS = {
    "float": row(257, 0.0, 20),
    "small": row(108, 0.05, 24),
    "smaller": row(106, 0.09, 25.5, reach=0.02),
    "fast": row(100, 0.4, 40),
    "shapeless": row(90, None, 50),
}


def test_bounds_are_a_number_and_a_word_in_either_order() -> None:
    found = fit.parse_bounds("110 MiB, KL 0.1,tau 2.2, 80% agreement", WORDS)
    assert [(bound.metric, bound.side, bound.value) for bound in found] == [
        *(("checkpoint_mib", "most", 110), ("kl", "most", 0.1), ("tau", "least", 2.2), ("agreement_pct", "least", 80))
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("110 MB", r'"110 MB" is no number with one of its words \(did you mean "MiB"\?\)'),
        ("KL", '"KL" is no number with one of its words'),
        (" , ", "--fit asks for nothing; say for example 110 MiB"),
    ],
)
def test_bounds_that_can_not_be_read_are_refused(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        fit.parse_bounds(text, WORDS)


def test_the_fastest_that_keeps_to_all_bounds_wins_and_doubts_are_told() -> None:
    found = fit.choose(ROWS, fit.parse_bounds("110 MiB, KL 0.1", WORDS), "one_stream")
    assert found == fit.Fit("smaller", ["smaller", "small"], ["small"], {"smaller": ["KL 0.1"]})
    said = fit.told(found, ROWS, "one_stream", "tokens/s")
    assert said == (
        "smaller fits, at 25.5 (tokens/s); level with it by their intervals: small; "
        "more seeds would tell whether these fit: smaller (KL 0.1)."
    )


def test_one_seed_says_nothing_of_who_is_level() -> None:
    speeds = {name: row["one_stream"].model_copy(update={"interval": None}) for name, row in ROWS.items()}
    rows = {name: {**row, "one_stream": speeds[name]} for name, row in ROWS.items()}
    found = fit.choose(rows, fit.parse_bounds("110 MiB", WORDS), "one_stream")
    assert found.level
    said = fit.told(found, rows, "one_stream", "tokens/s")
    assert f"; more seeds would tell whether it is ahead of: {', '.join(found.level)}" in said


def test_where_nothing_fits_that_is_said() -> None:
    found = fit.choose(ROWS, fit.parse_bounds("95 MiB, KL 0.1", WORDS), "one_stream")
    assert found.winner is None
    assert fit.told(found, ROWS, "one_stream", "") == "nothing fits; undecided: smaller (KL 0.1)."
    nothing = fit.choose(ROWS, fit.parse_bounds("95 MiB, 99 tokens/s", WORDS), "one_stream")
    assert fit.told(nothing, ROWS, "one_stream", "") == "nothing fits."
