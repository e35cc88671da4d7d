"""What is said of a gate's verdict, and that it is said the same in every form."""

import pytest

from infra.views.gate import GateReport, explain, headline, markdown, write_files
from infra.windows import Window
from models.gate import Params
from tasks.gate_draft import judged_report
from tasks.measure_draft import Measured, first_report
from tests.conftest import judge

WINDOW = Window(first_seq=5, last_seq=90, num_rows=80, sha256="0" * 64, owner="anyone")
PARAMS = Params(num_resamples=200)


def report(gains: dict[str, float], **settings: object) -> GateReport:
    return judged_report(judge(gains, **settings), PARAMS, parent=3, window=WINDOW, num_draft_tokens=2)


def test_a_pass_names_gain_bound_and_error_and_no_reason() -> None:
    passed = report({"chat": 0.2, "code": 0.1})
    assert (passed.verdict, passed.reasons) == ("passed", ())
    assert passed.test is not None
    assert passed.domains["chat"].tau_after - passed.domains["chat"].tau_before == pytest.approx(0.2)
    assert headline(passed) == f"Gate passed: τ +0.150 against draft 3, at least {passed.test.gain.low:+.3f}."
    said = explain(passed)
    assert "the same 60 held-out conversations" in said
    assert "a chance of 3.04%" in said
    assert "a gain is shown" in said
    assert said.endswith("So it may serve.")
    assert "## Reasons" not in markdown(passed)


def test_a_domain_that_pays_is_named_with_its_bound_and_the_floor() -> None:
    refused = report({"chat": 0.6, "code": -0.2})
    assert refused.verdict == "refused"
    code = refused.domains["code"]
    assert (len(code.refusals), refused.domains["chat"].refusals) == (1, ())
    assert refused.reasons == code.refusals
    assert f"in code ({code.change.low:+.1%})" in explain(refused)
    page = markdown(refused)
    assert f"| code | 30 | 1.492 | 1.292 | 1.492 | {code.change.value:+.1%} | {code.change.low:+.1%} | -5.0% |" in page
    assert f"- {code.refusals[0]}" in page
    assert "rows 5 to 90" in page


def test_a_candidate_without_gain_in_too_few_conversations_is_refused_for_both() -> None:
    judged = judge({"chat": 0.0}, test_index=2, unjudged=("sql",))
    strict = PARAMS.model_copy(update={"min_conversations": 40})
    few = judged.verdict.domains["chat"].model_copy(update={"gain": None, "relative": None, "best": None})
    verdict = judged.verdict.model_copy(update={"domains": {"chat": few}, "promote": False})
    refused = judged_report(judged.model_copy(update={"verdict": verdict}), strict, 3, WINDOW, 2)
    assert "no gain is shown" in explain(refused)
    assert "Too few conversations to judge: chat (30)." in explain(refused)
    page = markdown(refused)
    assert "too few conversations |" in page
    assert "too few conversations to judge: sql" in page
    assert "this was test 2 of its line" in page
    assert headline(refused).startswith("Gate refused: no gain shown")


def test_a_first_draft_had_nothing_to_be_compared_with() -> None:
    first = first_report(judge({"chat": 0.0}).measured, num_draft_tokens=2)
    assert "there was no champion to compare it with" in headline(first)
    assert "| chat | 30 | 1.492 |" in markdown(first)
    assert "floor" not in markdown(first)


@pytest.mark.parametrize("gains", [{"chat": 0.2}, {"chat": 0.2, "code": -0.2}])
def test_the_files_are_a_page_the_same_as_data_and_a_figure(tmp_path, gains: dict[str, float]) -> None:
    written = report(gains)
    page, data, figure = write_files(written, tmp_path)
    assert [file.name for file in (page, data, figure)] == ["gate.md", "gate.json", "gate.png"]
    assert page.read_text() == markdown(written)
    assert GateReport.model_validate_json(data.read_text()) == written
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_report_that_holds_more_settings_than_are_told_is_read() -> None:
    written = report({"chat": 0.2}).model_dump(mode="json")
    written["test"]["params"] |= {"name": "gate"}  # as reports once had it
    assert GateReport.model_validate(written) == report({"chat": 0.2})


def test_a_first_draft_has_no_figure(tmp_path) -> None:
    measured = Measured(tau={}, probe_tau=1.0, num_conversations={})
    assert [file.name for file in write_files(first_report(measured, 2), tmp_path)] == ["gate.md", "gate.json"]
