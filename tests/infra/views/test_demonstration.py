"""The demonstration's figures on a terminal."""

import io

from rich.console import Console

from infra.views.demonstration import show_demonstration

TAU = {"value": 1.5, "low": 1.4, "high": 1.6}
SUMMARY = {
    "num_sequences": 20,
    "num_looping": 2,
    "tau": TAU,
    "rate": None,
    "tau_without_loops": TAU,
    "rate_without_loops": TAU,
}
GAIN = {"value": 0.5, "low": 0.3, "high": 0.7}
RESULT = {
    "num_draft_tokens": 3,
    "domains": {"chat": {"before": SUMMARY, "after": SUMMARY, "gain": GAIN, "relative_gain": GAIN}},
    "tokens_per_s": {"on": {"chat": 120.0}, "off": {"chat": 90.0}},
    "outputs": {"num_compared": 20, "verdicts": {"equal": 20}},
    "training": [{"seconds": 12.4, "tokens_per_s": 900.0}],
    "requests": {"ok": 40},
    "swaps": 1,
    "seconds": 100.0,
}


def test_figures_stand_with_their_intervals_in_the_unit_of_their_row() -> None:
    written = io.StringIO()
    show_demonstration(RESULT, Console(file=written, width=120))
    lines = {line.split("  ")[0].strip(" │"): line for line in written.getvalue().splitlines()}
    assert "1.50 (1.40 to 1.60)" in lines["τ before"]
    assert "+0.50 (+0.30 to +0.70)" in lines["τ gain"]
    assert "+50.0% (+30.0% to +70.0%)" in lines["τ gain, relative"]
    assert "none" in lines["acceptance rate before"]
    assert "2 and 2" in lines["looping outputs, before and after"]
    assert "120.0" in lines["tokens/s, speculation on"]
    assert "training of the first draft: 12 s, 900 tokens/s" in written.getvalue()
