"""The state of a home on a terminal, line by line."""

import io

import pytest
from rich.console import Console

from infra.overview import DraftOverview, Gated, Overview
from infra.post_promotion import PostPromotionTest
from infra.querylog import LogStats
from infra.regression_sets import RegressionSet
from infra.rollouts import DraftCounts, Fleet, Replica
from infra.status import RecentAcceptance, RunningService
from infra.supervisor import ProcessRecord
from infra.trigger_store import now_ms
from infra.views.overview import show_overview
from infra.waiting import Waiting
from infra.windows import Attempt, SetAside, Window
from models.types import Finding
from tests.conftest import judge
from tests.infra.statuses import STATUS

ROWS = {"depth": 20, "total": 80, "per_domain": {"chat": 50, "code": 30}, "dropped": 3, "duplicates": 0, "bytes": 1}
LOG = LogStats(**ROWS, cursor=60, attempt=None, set_aside=())
TAGS = {"parent": "1", "rows": "1–60", "verdict": "passed", "reasons": "", "target_version": "1", "created_ms": 0}
DRAFT = DraftOverview(version=2, champion=True, tau={"chat": 1.55}, **TAGS)
SERVED = {"draft_version": 2, "speculating": False, "requests": {"200": 1200}, "refused": {"3-abc": "another output"}}
SERVICE = RunningService(**STATUS.model_dump() | SERVED | {"postponed": {}}, url="http://127.0.0.1:8000")
WAITING = Waiting(what="rows", words="rows: 20 of 180", since_ms=0)


def shown(**changed: object) -> list[str]:
    written, parts = io.StringIO(), {"drafts": (DRAFT,), "last_refresh": DRAFT, "log": LOG, "waiting": WAITING}
    seen = Overview(**{"service": None, "programs": ()} | parts | changed)
    show_overview(seen, Console(file=written, width=120))
    return [line.rstrip() for line in written.getvalue().splitlines()]


def program(name: str = "service", **changed: object) -> ProcessRecord:
    record = {"name": name, "url": "http://127.0.0.1:5000", "pid": 7, "restarts": 0, "ready": False, "log": ""}
    return ProcessRecord(**record | changed)


def tried(number: int, running: bool, error: str) -> LogStats:
    attempt = Attempt(first_seq=61, last_seq=80, number=number, running=running, error=error)
    return LOG.model_copy(update={"attempt": attempt})


def test_drafts_and_log_are_told_where_nothing_runs() -> None:
    lines = shown()
    assert any("champion" in line and "1–60" in line and "chat 1.55" in line for line in lines)
    assert lines[-3].startswith("waits for rows: 20 of 180; for ")
    assert [*lines[-5:-3], *lines[-2:]] == [
        "last refresh: draft 2, passed",
        "query log: 80 rows (chat: 50, code: 30), 20 waiting for a refresh, 3 dropped",
        "service: not running; start it with redraft serve or redraft up",
        "report: none yet; run: redraft report",
    ]
    assert shown(drafts=(), last_refresh=None)[0] == "no drafts yet; run: redraft build --recipe FILE"


def test_target_last_gate_and_pages_are_told() -> None:
    links = {"MLflow": "http://127.0.0.1:5000/#/models/draft/versions/2", "report": "file:///home/report.html"}
    passed = judge({"chat": 0.2}).origin(1, Window(first_seq=1, last_seq=60, num_rows=60, sha256="1" * 64, owner="a"))
    lines = shown(target="SmolLM2-135M-Instruct, version 1", last_gate=Gated(draft=2, report=passed), links=links)
    assert "target: SmolLM2-135M-Instruct, version 1" in lines
    assert any(line.startswith("last gate: draft 2. Gate passed: +0.200 tokens a step") for line in lines)
    assert lines[-2:] == [f"{name}: {link}" for name, link in links.items()]


@pytest.mark.parametrize(
    ("since_s", "pid", "told"),
    [
        (90, 7, "starting, 90 s"),
        (3600, 7, "does not answer, 1 h after its start; see: redraft logs service"),
        (None, 7, "starting"),  # before it holds the home
        (None, None, "not running; start it with redraft serve or redraft up"),
    ],
)
def test_a_service_that_does_not_answer_is_told_with_how_long_it_has_been_starting(since_s, pid, told) -> None:
    since_ms = None if since_s is None else now_ms() - 1000 * since_s
    assert f"service: {told}" in shown(programs=(program(pid=pid),), service_since_ms=since_ms)


ASIDE = SetAside(first_seq=1, last_seq=60, num_rows=60, num_attempts=3, time_ms=1_700_000_000_000, error="E: [x]")
BAD = DRAFT.model_copy(update={"version": 3, "verdict": "quarantined", "reasons": "[loss]", "champion": False})
TOLD = [
    ({"log": tried(1, True, "")}, "  rows 61–80: attempt 1 of 3 running"),
    ({"log": tried(2, False, "E: [loss] is NaN")}, "  rows 61–80: attempt 2 of 3 failed: E: [loss] is NaN"),
    ({"log": tried(3, True, "E: no")}, "  rows 61–80: attempt 3 of 3 running, the one before failed: E: no"),
    (
        {"log": LOG.model_copy(update={"set_aside": (ASIDE,)})},
        "  rows 1–60 are set aside since 2023-11-14 22:13 UTC, 3 attempts failed: E: [x]",
    ),
    ({"drafts": (BAD, DRAFT)}, "draft 3 is quarantined: [loss]"),
    ({"service": SERVICE.model_copy(update={"unplanned": "no requests"})}, "  steps are not planned: no requests"),
    *(
        (
            {"programs": (program("mlflow", restarts=2, **state),)},
            f"mlflow: {told}, restarted 2 times http://127.0.0.1:5000",
        )
        for told, state in {"running": {"ready": True}, "starting": {}, "down, starts soon": {"pid": None}}.items()
    ),
]


@pytest.mark.parametrize(("changed", "told"), TOLD)
def test_attempts_quarantines_and_programs_are_told_in_a_line(changed: dict[str, object], told: str) -> None:
    assert told in shown(**changed)


ATTACHED = {"attached servers": Fleet(rows=(Replica(wave=0, name="http://b:8000"),))}


@pytest.mark.parametrize("changed", [{"programs": (program("attach", url=""),)}, {"fleets": ATTACHED}])
def test_where_servers_are_attached_no_service_of_ours_is_missed(changed: dict[str, object]) -> None:
    assert not any(line.startswith("service: ") for line in shown(**changed))


FOUND = Finding(
    num_requests=90, tau=1.41, previous_tau=1.6, allowed=0.0, excess=0.08, excess_low=0.02, alpha=0.005, lost=True
)
TESTED = PostPromotionTest(
    draft=2, previous=1, num_wanted=500, found={"": FOUND, "code": FOUND.model_copy(update={"allowed": 0.05})}
)
LOST = "τ 1.41 against 1.60 of draft 1 on the same 90 requests, at least 0.020 steps a token more (99.5% sure)"
LOST_IN_CODE = '"code" τ 1.41 against 1.60 on 90, at least 0.020 steps a token more than a loss of 5% (99.5% sure)'


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"found": {}, "num_readable": 3}, "draft 2 running, 0 of 500 requests: no request compared yet"),
        ({"found": {}}, "blind, no request of draft 2 may be read"),
        ({"found": {}, "num_unreadable": 7}, "blind, none of the last 7 requests of draft 2 may be read"),
        (
            {"outcome": "settled", "found": {"": FOUND.model_copy(update={"lost": False})}},
            "draft 2 settled: τ 1.41 against 1.60 of draft 1 on the same 90 requests",
        ),
        ({"outcome": "rolled back"}, f"draft 2 rolled back: {LOST}; {LOST_IN_CODE}"),
    ],
)
def test_the_test_of_the_champion_is_told(changed: dict[str, object], told: str) -> None:
    lines = shown(post_promotion_test=TESTED.model_copy(update=changed))
    assert f"post-promotion test: {told}" in " ".join(" ".join(lines).split())


def test_a_past_draft_is_told_with_what_it_returns_for() -> None:
    back = DRAFT.model_copy(update={"rows": "", "returns": "draft 1 returns for code"})
    lines = shown(drafts=(back,), last_refresh=back)
    assert any("champion" in line and "draft 1 returns for code" in line for line in lines)
    assert "last refresh: draft 2, passed: draft 1 returns for code" in lines


def test_a_service_is_told_with_what_it_refused_and_accepts() -> None:
    assert shown(service=SERVICE)[-8:-1] == [
        "service: http://127.0.0.1:8000/v1, draft 2, speculation off (switched off by an operator)",
        "  engine compiled: compiled steps are faster",
        "  answered with 200: 1,200; swaps: 2",
        "  draft 3-abc is refused: another output",
        "  chat: τ 1.75 over the last 9 requests that it drafted alone",
        "  requests of up to 2,048 tokens: τ 1.75 over the last 9",
        "  chat: the draft's vocabulary has 87.5% of the tokens of the last answers",
    ]


def test_each_domain_has_a_verdict_while_the_service_speculates() -> None:
    acceptance = {"chat": SERVICE.acceptance["chat"], "sql": SERVICE.acceptance["chat"]}
    speculating = SERVICE.model_copy(update={"speculating": True, "acceptance": acceptance})
    told = [line for line in shown(service=speculating) if "speculation speeds" in line or "too few" in line]
    assert told == [
        "  speculation speeds chat up 1.50× (1.40 to 1.60); 75.0 tokens/s of one request, 50.0 without",
        "  sql: too few steps to tell what speculation gives; it takes 192",
    ]
    unplanned = speculating.model_copy(update={"unplanned": "another vLLM"})
    assert not any("speeds" in line or "too few" in line for line in shown(service=unplanned))


def test_attached_servers_are_told_with_draft_wave_and_acceptance() -> None:
    counts = DraftCounts(steps=1000, drafted=2000, accepted=700, per_position=(500, 200))
    rows = (
        Replica(version="2-abc", proven=True, wave=0, name="http://[::1]:8000", state="serving", counts=counts),
        Replica(wave=1, name="http://b:8000"),
    )
    found = {rows[0].name: {"code": RecentAcceptance.of([(10, 30, 15), (10, 30, 5)])}}
    fleets = {"attached servers": Fleet(rows=rows, candidate="2-abc")}
    assert shown(fleets=fleets, acceptance=found)[-6:-1] == [
        "rollout: draft 2-abc: canary, which waits for the post-promotion test, 1 of 2 replicas have it",
        "attached server http://[::1]:8000: serving, draft 2-abc, wave 0",
        "  by its metrics: τ 1.70 over 1,000 steps of all domains, accepted by position 0.50, 0.20",
        "  code: τ 2.00 over its last 2 requests",
        "attached server http://b:8000: starting, draft unknown, wave 1",
    ]


def test_a_replica_that_left_a_rollout_says_why() -> None:
    row = Replica(version="1-abc", wave=2, name="host:8000/a", state="serving", failed={"2-abc": "holds NaN"})
    assert shown(fleets={"target abc": Fleet(rows=(row,))})[-3:-1] == [
        "replica host:8000/a: serving, draft 1-abc",
        "  draft 2-abc failed here: holds NaN",
    ]


def test_regression_sets_that_are_not_full_are_told_with_since_when_and_that_they_stop_nothing() -> None:
    full, filling = RegressionSet(100, now_ms()), RegressionSet(26, now_ms() - 2 * 24 * 3600 * 1000)
    told = "regression sets that wait for conversations, of 100 each, and stop no draft meanwhile: code: 26 for 2 d"
    assert told in shown(regression_sets={"chat": full, "code": filling})
    assert not any("regression sets" in line for line in shown(regression_sets={"chat": full}))


@pytest.mark.parametrize(("learnt", "is_told"), [(1024, True), (1500, False), (None, False)])
def test_it_is_told_where_requests_are_longer_than_what_the_draft_learnt_from(learnt, is_told) -> None:
    by_context = {"acceptance_by_context": {"longer": SERVICE.acceptance["chat"]}}
    drafts = (DRAFT.model_copy(update={"trained_context": learnt}),)
    lines = shown(service=SERVICE.model_copy(update=by_context), drafts=drafts)
    assert "  requests that are longer: τ 1.75 over the last 9" in lines
    told = "  requests have up to 1,500 tokens, what the draft learnt from 1,024: beyond them acceptance falls"
    assert any(line.startswith(told) for line in lines) == is_told
