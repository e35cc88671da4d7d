"""What is said of a gate's verdict, and that it is said the same in every form."""

from xml.etree import ElementTree

import pytest

from infra.views.gate import explain, headline, markdown, write_files
from infra.windows import Window
from models.types import GateReport
from tasks.measure_draft import first_report
from tests.conftest import judge

WINDOW = Window(first_seq=5, last_seq=90, num_rows=80, sha256="0" * 64, owner="anyone")


def report(gains: dict[str, float], **settings: object) -> GateReport:
    return judge(gains, **settings).origin(3, WINDOW)


def test_a_pass_names_gain_bound_and_error_and_no_reason() -> None:
    passed = report({"chat": 0.2, "code": 0.1})
    assert (passed.verdict, passed.reasons) == ("passed", ())
    assert passed.test is not None
    assert passed.domains["chat"].tau_after - passed.domains["chat"].tau_before == pytest.approx(0.2)
    low, last, said = passed.test.gain.low, passed.test.last, explain(passed)
    assert headline(passed) == f"Gate passed: +0.150 tokens a step against draft 3, at least {low:+.3f}."
    for told in (
        "the same 240 held-out conversations of its window",
        "a chance of 3.04%",
        "a gain is shown",
        f"gains +0.150 ({last.low:+.3f} to {last.high:+.3f}, 95%)",
        "So it may serve.",
    ):
        assert told in said
    assert "## Reasons" not in markdown(passed)
    test = passed.test.model_copy(update={"num_windows": 4, "num_conversations": 480})
    assert "the same 480 held-out conversations of its 4 windows" in explain(passed.model_copy(update={"test": test}))


def test_a_domain_that_pays_is_named_with_its_bound_and_the_floor() -> None:
    learning = report({"chat": 0.6, "code": -0.2})
    assert learning.verdict == "undecided"
    code = learning.domains["code"]
    assert (len(code.refusals), learning.domains["chat"].refusals) == (1, ())
    assert learning.reasons[1:] == code.refusals
    assert f"in code ({code.change.low:+.1%})" in explain(learning)
    page = markdown(learning)
    change = f"{code.change.value:+.1%} | {code.change.low:+.1%}"
    assert f"| code | 120 | 1.499 | 1.299 | 1.499 | – | {change} | -5.0% |" in page
    assert f"- {code.refusals[0]}" in page
    assert "rows 5 to 90" in page


def test_a_challenger_without_gain_is_undecided_and_few_conversations_block_nothing() -> None:
    judged = judge({"chat": 0.0}, challenger=2, left_out=("sql",))
    loose = {"chat": judged.report.domains["chat"].model_copy(update={"binding": False})}
    undecided = judged.origin(3, WINDOW).model_copy(update={"domains": loose})
    assert undecided.verdict == "undecided"
    low = judged.test.gain.low
    standing = f"learning: gain +0.000 tokens a step, at least {low:+.3f} after 1 window"
    assert (undecided.reasons, headline(undecided)) == ((standing,), f"Gate undecided: {standing}.")
    said = explain(undecided)
    assert "no gain is shown" in said
    assert "Too few conversations, or too short ones, for a floor to hold: chat (120)." in said
    assert said.endswith("So it learns on, and draft 3 stays.")
    page = markdown(undecided)
    assert "says too little to block |" in page
    assert "Without a conversation to score: sql" in page
    assert "this was challenger 2 of its champion" in page


def test_a_past_draft_is_said_to_return_and_not_to_be_trained() -> None:
    back = judge({"chat": 0.2}, learns=False).origin(3, returns=1)
    assert "Draft 1, which served before, compared with draft 3; it was not trained again." in markdown(back)


def test_a_first_draft_had_nothing_to_be_compared_with_and_no_figure(tmp_path) -> None:
    first = first_report(judge({"chat": 0.0}).measured, num_draft_tokens=2)
    assert "there was no champion to compare it with" in headline(first)
    assert "| chat | 120 | 1.499 |" in markdown(first)
    assert "floor" not in markdown(first)
    assert [file.name for file in write_files(first, tmp_path)] == ["gate.md", "gate.json"]


@pytest.mark.parametrize("gains", [{"chat": 0.2}, {"chat": 0.2, "code": -0.2}])
def test_the_files_are_a_page_the_same_as_data_and_a_figure(tmp_path, gains: dict[str, float]) -> None:
    written = report(gains)
    page, data, figure = write_files(written, tmp_path)
    assert [file.name for file in (page, data, figure)] == ["gate.md", "gate.json", "gate.svg"]
    assert page.read_text() == markdown(written)
    assert GateReport.model_validate_json(data.read_text()) == written
    charts = ElementTree.parse(figure).getroot().findall("{http://www.w3.org/2000/svg}svg")
    assert len(charts) == 2  # the gain, and what each domain pays
