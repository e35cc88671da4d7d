"""The demonstration's figures on a terminal."""

import io

from rich.console import Console

from infra.views.demonstration import show_demonstration

TAU, GAIN = {"value": 1.5, "low": 1.4, "high": 1.6}, {"value": 0.5, "low": 0.3, "high": 0.7}
LOOPS = {"tau_without_loops": TAU, "rate_without_loops": TAU}
SUMMARY = {"num_sequences": 20, "num_looping": 2, "tau": TAU, "rate": None, **LOOPS}
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
VERDICTS = {"equal": 5, "near-tie": 1}
STOCK = {"tokens_per_s": {"chat": 80.0}, "gain": {"chat": 1.5}, "outputs": {"num_compared": 6, "verdicts": VERDICTS}}


def shown(**changed: object) -> str:
    written = io.StringIO()
    show_demonstration({**RESULT, **changed}, Console(file=written, width=120))
    return written.getvalue()


def test_figures_stand_with_their_intervals_in_the_unit_of_their_row() -> None:
    lines = shown(stock=STOCK).splitlines()
    for name, told in {
        "τ before": "1.50 (1.40 to 1.60)",
        "τ gain": "+0.50 (+0.30 to +0.70)",
        "τ gain, relative": "+50.0% (+30.0% to +70.0%)",
        "acceptance rate before": "none",
        "looping outputs, before and after": "2 and 2",
        "tokens/s, speculation on": "120.0",
        "tokens/s, vLLM compiled without a draft": "80.0",
        "against vLLM compiled without a draft": "1.50×",
    }.items():
        assert told in next(line for line in lines if name in line)
    assert str(VERDICTS) in shown(stock=STOCK)
    assert "training of the first draft: 12 s, 900 tokens/s" in shown()


def test_where_vllm_was_not_timed_it_is_not_told() -> None:
    assert "vLLM" not in shown()
    assert "vLLM" not in shown(stock=None)
