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


def test_vllm_compiled_without_a_draft_stands_beside_where_it_was_timed() -> None:
    def shown(result: dict[str, object]) -> str:
        written = io.StringIO()
        show_demonstration(result, Console(file=written, width=120))
        return written.getvalue()

    stock = {
        "tokens_per_s": {"chat": 80.0},
        "gain": {"chat": 1.5},
        "outputs": {"num_compared": 6, "verdicts": {"equal": 5, "near-tie": 1}},
    }
    lines = shown({**RESULT, "stock": stock}).splitlines()
    assert any("tokens/s, vLLM compiled without a draft" in line and "80.0" in line for line in lines)
    assert any("against vLLM compiled without a draft" in line and "1.50×" in line for line in lines)
    assert "{'equal': 5, 'near-tie': 1}" in shown({**RESULT, "stock": stock})
    for without in (RESULT, {**RESULT, "stock": None}):
        assert "vLLM" not in shown(without)
