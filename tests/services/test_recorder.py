import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from infra.consent import OTHER_DOMAINS, QueryRow
from infra.processes import wait_until
from infra.querylog import BackgroundWriter, QueryLog
from infra.status import LogCounts, RecentAcceptance
from infra.views.acceptance import from_log
from models.chats import ChatEncoder
from models.core.evaluation.acceptance import UNDRAFTED
from models.engines import Completion
from models.targets.random import byte_tokenizer
from services.questions import Origin
from services.recorder import LATELY, MAX_DOMAINS, MAX_DRAFTS, ROLLING, Recorder, VocabularyCoverage

ID = f"{1:032x}"
TOKENIZER = byte_tokenizer()
REWRITE = ChatEncoder.of(TOKENIZER).rewrite


class Settings(NamedTuple):
    """The part of vLLM's SamplingParams that is read."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 32


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def completion(
    request_id: str = f"chatcmpl-{ID}", prompt: str = "hi", text: str = "there", **changes: Any
) -> Completion:
    fields: dict[str, Any] = {"request_id": request_id, "prompt_ids": (*encode(prompt),), "token_ids": (*encode(text),)}
    fields |= {"drafted": (3, 3, 0), "accepted": (2, 0, 0), "drafted_ids": ((1, 2, 3), (4, 5, 6), ())}
    fields |= {"finish_reason": "stop", "first_token_ms": 5.0, "per_token_ms": 1.0}
    return Completion(**fields | {"draft_version": "7", "speculating": True} | changes)


@pytest.fixture
def querylog(tmp_path: Path) -> QueryLog:
    return QueryLog(tmp_path / "queries.db")


@pytest.fixture
def recorder(querylog: QueryLog) -> Iterator[Recorder]:
    made = Recorder(BackgroundWriter(querylog), REWRITE, target_version=2)
    yield made
    made.close()
    querylog.close()


def origin(consent: str = "full", request_id: str = ID, domain: str = "chat") -> Origin:
    return Origin(request_id, domain, consent, "s" * 64, group="9" * 64)


def record(
    recorder: Recorder, number: int = 1, consent: str = "full", domain: str = "chat", asks: str = "on", **answered: Any
) -> None:
    """Let a request be asked and answered."""
    request_id = f"{number:032x}"
    recorder.expect(origin(consent, request_id, domain)._replace(speculation=asks))
    recorder.finished(completion(f"chatcmpl-{request_id}", **answered), Settings())


def written(recorder: Recorder, querylog: QueryLog, consent: str = "full") -> QueryRow:
    """Return the one row that a recorder wrote."""
    recorder.close()
    (row,) = querylog.rows(1, 9, consent)
    return row


def told(recorder: Recorder) -> dict[str, Any]:
    """Return what the client is told of its request's drafting."""
    return dict(recorder.usage(ID) or {})


def test_a_consented_request_becomes_a_row_with_its_ids_and_steps(recorder: Recorder, querylog: QueryLog) -> None:
    record(recorder, drafting="auto", matches=(0, 5, 0))
    assert (told(recorder)["accepted"], told(recorder)["looked_up"]) == (2, 0)
    row = written(recorder, querylog)
    assert (row.domain, row.subject, row.group) == ("chat", "s" * 64, "9" * 64)
    assert (row.target_version, row.draft_version, row.drafting, row.matches) == (2, 7, "auto", [0, 5, 0])
    assert (row.prompt, row.completion) == ("hi", "there")
    assert (row.prompt_ids, row.completion_ids) == (encode("hi"), encode("there"))
    assert (row.drafted, row.accepted, row.drafted_ids) == ([3, 3, 0], [2, 0, 0], [[1, 2, 3], [4, 5, 6], []])
    assert row.sampling == {"temperature": 0.0, "top_p": 1.0, "max_tokens": 32}


def test_a_row_names_the_server_that_the_answer_names_or_the_recorders_own(querylog: QueryLog) -> None:
    recorder = Recorder(BackgroundWriter(querylog), REWRITE, target_version=2, server="host:1")
    record(recorder, 1)
    record(recorder, 2, server="host:2")
    recorder.close()
    assert [row.server for row in querylog.rows(1, 9)] == ["host:1", "host:2"]
    querylog.close()


def test_without_full_consent_no_text_is_kept_and_with_none_no_row(recorder: Recorder, querylog: QueryLog) -> None:
    record(recorder, 1, "metadata")
    record(recorder, 2, "none")
    row = written(recorder, querylog, "metadata")
    assert (row.prompt, row.completion_ids, row.drafted_ids, row.accepted) == (None, None, None, [2, 0, 0])
    assert row.group is None
    assert querylog.stats().total == 1


def test_an_answer_too_short_to_learn_from_is_counted_without_its_text(recorder: Recorder, querylog: QueryLog) -> None:
    for number in range(3):
        record(recorder, number, text="abc"[: number + 1])
    recorder.close()
    assert (querylog.stats().total, querylog.stats().depth) == (3, 1)
    assert [row.completion for row in querylog.rows(1, 9)] == ["abc"]


def test_what_was_scrubbed_is_encoded_again_and_loses_its_steps(recorder: Recorder, querylog: QueryLog) -> None:
    record(recorder, prompt="<|im_start|>user\nwrite to ann@example.org<|im_end|>")
    row = written(recorder, querylog)
    assert row.prompt == "<|im_start|>user\nwrite to [EMAIL]<|im_end|>"
    assert row.prompt_ids == encode(row.prompt)
    assert (row.completion, row.drafted, row.accepted, row.drafted_ids) == ("there", None, None, None)


def test_several_generations_of_one_request_are_rows_and_one_usage(recorder: Recorder, querylog: QueryLog) -> None:
    recorder.expect(origin())
    for index in range(2):
        recorder.finished(completion(f"cmpl-{ID}-{index}"), Settings())
    counts = {"draft_version": "7", "drafted": 12, "accepted": 4, "looked_up": 0, "steps": 6}
    counts["mean_accepted_length"] = 1.6667
    assert recorder.usage(ID) == counts
    steps = {"drafted_per_step": [3, 3, 0] * 2, "accepted_per_step": [2, 0, 0] * 2}
    assert recorder.usage(ID, by_step=True) == counts | steps
    recorder.forget(ID)
    assert (recorder.usage(ID), recorder.origin_of(f"cmpl-{ID}-2")) == (None, None)
    recorder.close()
    assert len(querylog.rows(1, 9)) == 2


def test_probes_strangers_and_several_choices_leave_nothing(recorder: Recorder, querylog: QueryLog) -> None:
    recorder.expect(origin())
    recorder.finished(completion("probe-7-0"), Settings())
    recorder.finished(completion(f"chatcmpl-{'e' * 32}"), Settings())
    recorder.finished(completion(), Settings(n=2))
    assert recorder.usage(ID) is None
    assert recorder.acceptance("7") == {}
    recorder.close()
    assert querylog.stats().total == 0


def test_a_client_that_left_still_has_its_row_but_no_usage(recorder: Recorder, querylog: QueryLog) -> None:
    recorder.expect(origin())
    recorder.forget(ID)
    recorder.finished(completion(finish_reason=None), Settings())
    recorder.finished(completion(finish_reason=None), Settings())
    assert recorder.usage(ID) is None
    row = written(recorder, querylog)
    assert row.finish_reason == "abort"


def test_rolling_acceptance_is_by_domain_and_bounded_in_domains(recorder: Recorder) -> None:
    for index in range(MAX_DOMAINS + 5):
        record(recorder, index, "none", f"d{index}")
        recorder.forget(f"{index:032x}")
    figures = recorder.acceptance("7")
    assert (len(figures), figures["other"].requests) == (MAX_DOMAINS + 1, 5)
    assert figures["d0"] == RecentAcceptance(requests=1, acceptance_rate=2 / 6, mean_accepted_length=1 + 2 / 3)


def test_rolling_acceptance_is_by_context_length_over_all_domains(recorder: Recorder) -> None:
    for index, (domain, num_tokens) in enumerate([("chat", 507), ("code", 508), ("chat", 9000), ("code", 99_999)]):
        tokens = tuple(range(num_tokens))
        record(recorder, index, "none", domain, prompt_ids=tokens, accepted=(index % 3, 0, 0))  # the answer has 5
    figures = recorder.acceptance_by_context("7")
    assert {length: one.requests for length, one in figures.items()} == {"512": 1, "2048": 1, "32768": 1, "longer": 1}
    assert [one.mean_accepted_length for one in figures.values()] == [1.0, 1 + 1 / 3, 1 + 2 / 3, 1.0]
    assert recorder.acceptance_by_context("8") == {}
    for index in range(ROLLING):
        record(recorder, index, "none", f"d{index}")
    assert recorder.acceptance_by_context("7")["512"].requests == ROLLING


def test_the_longest_of_the_last_requests_is_known_however_it_was_drafted(recorder: Recorder) -> None:
    assert recorder.longest_context() == 0
    record(recorder, 1, "none", prompt_ids=tuple(range(700)), speculating=False)
    assert recorder.longest_context() == 705
    for index in range(LATELY):
        record(recorder, index, "none")
    assert recorder.longest_context() == len(encode("hi")) + len(encode("there"))


def test_requests_count_for_their_own_draft_in_their_order_and_the_last_drafts_are_kept(recorder: Recorder) -> None:
    asked = [("7", "code"), ("8", "chat"), ("7", "chat"), ("7", "code")]  # the last two began before a swap
    for index, (draft, domain) in enumerate(asked):
        record(recorder, index, "none", domain, draft_version=draft)
    assert [trace.domain for trace in recorder.recent("7")] == ["code", "chat", "code"]
    assert [len(recorder.acceptance(draft)) for draft in ("7", "8", "9")] == [2, 1, 0]
    drafts = [str(number) for number in range(20, 21 + MAX_DRAFTS)]
    for index, draft in enumerate(drafts):
        record(recorder, index, "none", draft_version=draft)
    assert [bool(recorder.acceptance(draft)) for draft in drafts] == [False] + [True] * MAX_DRAFTS


def test_a_row_that_can_not_be_made_is_counted_and_the_next_written_whatever_fails(querylog: QueryLog) -> None:
    def fails(completion: Completion, row_id: str | None) -> None:
        raise RuntimeError("Event loop is closed")

    recorder = Recorder(BackgroundWriter(querylog), REWRITE, target_version=2, settle=fails)
    record(recorder, finish_reason="Not A Word")
    recorder.finished(completion(), Settings())
    recorder.close()
    assert recorder.counts() == LogCounts(written=1, dropped=1, unlogged=0, last_error=None)
    querylog.close()


def test_a_full_queue_drops_and_never_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    querylog = QueryLog(tmp_path / "queries.db")
    querylog.stats()
    monkeypatch.setattr("infra.database.BUSY_TIMEOUT_S", 600.0)
    recorder = Recorder(BackgroundWriter(querylog, capacity=1, batch=1), REWRITE, target_version=0, capacity=1)
    recorder.expect(origin())
    with closing(sqlite3.connect(querylog.database.file, isolation_level=None)) as locker:
        locker.execute("BEGIN IMMEDIATE")
        for _ in range(200):
            recorder.finished(completion(prompt="word " * 50), Settings())
        wait_until(lambda: recorder.counts().dropped > 0, 60, None, "a row without room")
        assert (recorder.counts().written, recorder.counts().last_error) == (0, None)  # the writer waits for the lock
    recorder.close()
    counts = recorder.counts()
    assert counts.written + counts.dropped == 200


@pytest.mark.parametrize(
    ("left_out", "asks"),
    [
        ({"drafting": "auto"}, "on"),
        ({"drafting": "off"}, "on"),
        ({"speculating": False, "drafted": (), "accepted": (), "drafted_ids": ()}, "on"),
        ({"structured": True, "matches": (4, 0, 0)}, "on"),
        ({}, "head"),  # else a client could choose what a draft is scored on
    ],
    ids=["look-up", "not drafted", "off", "a grammar", "asked for"],
)
def test_only_requests_that_were_drawn_and_that_the_draft_drafted_alone_judge_it(
    recorder: Recorder, left_out: dict[str, Any], asks: str
) -> None:
    record(recorder, 0, asks=asks, **left_out)
    record(recorder, 1, domain="code", drafting="head")
    assert [trace.domain for trace in recorder.recent("7")] == ["code"]


def test_where_nothing_was_drafted_no_accepted_length_is_told(recorder: Recorder) -> None:
    record(recorder, speculating=False, drafted=(), accepted=(), drafted_ids=())
    assert (told(recorder)["steps"], told(recorder)["mean_accepted_length"]) == (0, None)


def test_what_look_up_gained_is_told_apart(recorder: Recorder) -> None:
    record(recorder, matches=(4, 0, 0))
    assert (told(recorder)["accepted"], told(recorder)["looked_up"]) == (2, 2)
    assert recorder.accepted == {"head": 0, "lookup": 2, "structured": 0}
    record(recorder, 2)  # of an engine that looks nothing up
    assert (recorder.accepted, recorder.tokens) == ({"head": 2, "lookup": 2, "structured": 0}, 10)


def test_what_a_grammar_constrained_is_counted_for_itself(recorder: Recorder, querylog: QueryLog) -> None:
    record(recorder, structured=True, matches=(4, 0, 0))
    assert recorder.accepted == {"head": 0, "lookup": 0, "structured": 2}
    row = written(recorder, querylog)
    assert row.structured and from_log([row]) == []


def test_steps_for_which_nothing_was_to_draft_lower_no_accepted_length(recorder: Recorder, querylog: QueryLog) -> None:
    record(recorder, matches=(0, 0, UNDRAFTED))
    assert [told(recorder)[name] for name in ("steps", "looked_up", "mean_accepted_length")] == [3, 0, 2.0]
    assert recorder.acceptance("7")["chat"].mean_accepted_length == 2.0
    (served,) = from_log([written(recorder, querylog)])
    assert (served.drafted, served.accepted) == ((3, 3), (2, 0))


def test_answers_without_a_step_and_without_a_draft_leave_the_window_to_others(recorder: Recorder) -> None:
    record(recorder)
    for _ in range(ROLLING):  # what asks whether the service lives
        recorder.finished(completion(text="t", drafted=(), accepted=(), drafted_ids=()), Settings(max_tokens=1))
        recorder.finished(completion(matches=(UNDRAFTED,) * 3, accepted=(0,) * 3), Settings())
    assert [(one.steps, one.accepted) for one in recorder.recent("7")] == [(3, 2)]


def test_a_share_is_of_the_tokens_after_the_first_of_answers_of_the_draft_that_is_followed() -> None:
    coverage = VocabularyCoverage()
    coverage.add("", "code", [1, 1])
    coverage.follow("3", frozenset({1, 2}))
    coverage.add("2", "code", [1, 8])
    assert coverage.shares() == {}
    for domain, tokens in (("code", [9, 1, 2, 8, 8]), ("code", [9]), ("chat", [9, 1])):
        coverage.add("3", domain, tokens)
    assert coverage.shares() == {"chat": 1.0, "code": 0.5}
    coverage.follow("4", None)  # which can say every token
    coverage.add("4", "code", [1, 1])
    assert coverage.shares() == {}


def test_a_share_is_over_the_last_answers_and_domains_are_bounded() -> None:
    coverage = VocabularyCoverage()
    coverage.follow("3", frozenset({1}))
    for token in [2] * ROLLING + [1] * ROLLING:
        coverage.add("3", "code", [0, token])
    for number in range(2 * MAX_DOMAINS):
        coverage.add("3", f"made up {number}", [0, 1])
    shares = coverage.shares()
    assert shares["code"] == 1.0
    assert len(shares) == MAX_DOMAINS + 1 and OTHER_DOMAINS in shares
