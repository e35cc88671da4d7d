"""What holds of consent and of the query log for whatever a client sends and in whatever order things happen."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from starlette.datastructures import Headers

from infra import consent
from infra.consent import CONSENT_LEVELS, Consent, QueryRow, consent_level, redact, require_loggable
from infra.querylog import BackgroundWriter, QueryLog
from infra.windows import Window
from services.access import Caller
from services.questions import describe_origin
from tests.infra.conftest import STORES, new_schema
from tests.infra.rows import erase, row

MARK = "PLANTED"
levels = st.sampled_from(CONSENT_LEVELS)
# JSON can hold any of it but a lone surrogate, which a row refuses.
texts = st.text(st.characters(exclude_categories=["Cs"]))
planted = texts.map(lambda text: text + MARK)
tokens = st.lists(st.integers(0, 2**40), max_size=4)
numbers = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
values = st.recursive(numbers | planted, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=4)
header_values = st.none() | levels | st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=12)


@st.composite
def rows(draw: st.DrawFn) -> QueryRow:
    """Rows as a recorder makes them, their text, and what else a request holds, marked."""
    steps = draw(st.lists(st.integers(0, 3), max_size=3))
    drawn = {
        "id": draw(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=128)),
        "time_ms": draw(st.integers(-(2**53), 2**53)),
        "group": draw(st.none() | st.from_regex("[0-9a-f]{64}", fullmatch=True)),
        "consent": draw(levels),
        "draft_version": draw(st.none() | st.integers(0, 9)),
        "drafted": steps,
        "accepted": [draw(st.integers(0, number)) for number in steps],
        "drafted_ids": draw(st.none() | st.just([[7] * number for number in steps])),
        "sampling": draw(st.dictionaries(st.sampled_from(["temperature", "stop", "seed"]), values, max_size=3)),
        "speculating": draw(st.booleans()),
    }
    drawn |= {name: draw(st.none() | planted) for name in ("prompt", "completion")}
    drawn |= {name: draw(st.none() | tokens) for name in ("prompt_ids", "completion_ids")}
    return QueryRow(**row("a1").model_dump() | drawn)


@pytest.mark.slow
@given(header=header_values, store=st.none() | st.booleans(), policy=st.none() | levels)
def test_consent_is_that_of_the_strictest_who_spoke(header: str | None, store: bool | None, policy: str | None) -> None:
    said: list[Consent] = [] if store is None else ["full" if store else "none"]
    said += [level if level in CONSENT_LEVELS else "none" for level in (header, policy) if level is not None]
    assert consent_level(header, store, policy) == min(said, key=CONSENT_LEVELS.index, default="metadata")


@pytest.mark.slow
@given(sent=st.lists(header_values.filter(bool), max_size=3), store=st.none() | values, policy=st.none() | levels)
def test_no_header_and_no_body_makes_a_request_less_strictly_logged_than_its_key_says(sent, store, policy) -> None:
    headers = Headers(raw=[(b"x-redraft-log", value.encode("latin-1")) for value in sent])
    caller = Caller("0" * 64, "client", policy)
    found = describe_origin("0" * 32, headers, {"store": store}, caller, bytes(32)).consent
    if policy is not None:
        assert CONSENT_LEVELS.index(found) <= CONSENT_LEVELS.index(policy)
    if len(sent) > 1 or (sent and sent[0] not in CONSENT_LEVELS) or store not in (None, True):
        assert found == "none"


@given(row=rows(), first=levels, second=levels)
def test_what_is_written_of_a_row_is_what_the_strictest_allows_and_no_text_hides_in_it(row, first, second) -> None:
    strictest = min(first, row.consent, key=CONSENT_LEVELS.index)
    kept = redact(row, first)
    if strictest == "none":
        assert kept is None
        return
    assert kept is not None and kept.consent == strictest
    if strictest == "metadata":
        assert MARK not in kept.model_dump_json()
        assert {getattr(kept, name) for name in consent.CONTENT_FIELDS} == {None}
    else:
        assert kept == row
    require_loggable(kept)
    assert redact(kept, second) == redact(row, min(first, second, key=CONSENT_LEVELS.index))


@pytest.fixture(scope="module", params=STORES)
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[QueryLog]:
    file = tmp_path_factory.mktemp("log") / "queries.db"
    schema = new_schema(request.getfixturevalue("postgres")) if request.param == "postgres" else iter([file])
    log = QueryLog(next(schema))
    yield log
    log.close()
    next(schema, None)


@given(row=rows())
def test_a_row_that_may_be_written_comes_back_as_it_was(log: QueryLog, row: QueryRow) -> None:
    kept = redact(row, row.consent)
    if kept is None:
        with pytest.raises(ValueError, match="consent"):
            log.append([row])
        return
    if log.append([kept]):
        [found] = log.latest(1)
        assert found.model_copy(update={"seq": None}) == kept


@pytest.mark.slow
@settings(max_examples=10)
@given(offered=st.integers(0, 160), capacity=st.integers(1, 16), batch=st.integers(1, 8))
def test_every_row_that_a_writer_is_offered_is_in_the_log_or_counted(offered: int, capacity: int, batch: int) -> None:
    with TemporaryDirectory() as folder:
        log = QueryLog(Path(folder) / "queries.db")
        writer = BackgroundWriter(log, capacity, batch)
        taken = [writer.offer(row(f"a{number}")) for number in range(offered)]
        writer.close()
        stats = log.stats()
        log.close()
    assert (stats.total, stats.dropped) == (writer.written, writer.dropped)
    assert (taken.count(True), len(taken)) == (writer.written, writer.written + writer.dropped)


named = st.tuples(st.integers(0, 40), st.sampled_from(CONSENT_LEVELS[1:]), st.sampled_from(["s1", "s2"]))


class LogMachine(RuleBasedStateMachine):
    """A log beside a model of it: the rows that it must hold, in the order in which they came."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.log = QueryLog(Path(self.folder.name) / "queries.db")
        self.held: dict[str, QueryRow] = {}
        self.duplicates = self.dropped = 0
        self.window: Window | None = None
        self.trained: list[str] = []

    def teardown(self) -> None:
        self.log.close()
        self.folder.cleanup()

    @rule(named=st.lists(named, min_size=1, max_size=8), refused=st.booleans(), dropped=st.integers(0, 3))
    def append(self, named: list[tuple[int, Consent, str]], refused: bool, dropped: int) -> None:
        made = [row(f"a{number}", consent=consent, subject=subject) for number, consent, subject in named]
        if refused:
            with pytest.raises(ValueError, match="consent 'none'"):
                self.log.append([*made, row("a99", consent="none")], dropped)
            return
        before = len(self.held)
        for one in made:
            self.held.setdefault(one.id, one)
        assert self.log.append(made, dropped) == len(self.held) - before
        self.duplicates += len(made) - len(self.held) + before
        self.dropped += dropped

    @precondition(lambda self: self.window is None)
    @rule(max_rows=st.integers(1, 5))
    def claim(self, max_rows: int) -> None:
        depth = self.log.stats().depth
        self.window = self.log.windows.claim("run", max_rows)
        assert (0 if self.window is None else self.window.num_rows) == min(depth, max_rows)

    @precondition(lambda self: self.window is not None)
    @rule(done=st.booleans())
    def end(self, done: bool) -> None:
        assert self.window is not None
        if done:
            self.trained += [found.id for found in self.log.rows(self.window.first_seq, self.window.last_seq)]
            self.log.windows.commit(self.window)
        else:
            self.log.windows.release(self.window)
        self.window = None

    @precondition(lambda self: self.window is None)
    @rule(subject=st.sampled_from(["s1", "s2"]))
    def erase(self, subject: str) -> None:
        gone = [name for name, one in self.held.items() if one.subject == subject]
        assert erase(self.log, subject).rows == len(gone)
        for name in gone:
            del self.held[name]
        self.trained = [name for name in self.trained if name not in gone]  # the same id may come again

    @invariant()
    def nothing_is_lost_and_nothing_is_trained_on_twice(self) -> None:
        found = self.log.latest(10**6)
        assert [one.model_copy(update={"seq": None}) for one in found] == [*self.held.values()]
        assert all((low.seq or 0) < (high.seq or 0) for low, high in itertools.pairwise(found))
        stats = self.log.stats()
        assert (stats.total, stats.duplicates, stats.dropped) == (len(self.held), self.duplicates, self.dropped)
        full = [one.id for one in found if one.consent == "full"]
        assert self.trained == full[: len(self.trained)]
        assert stats.depth == len(full) - len(self.trained)


LogMachine.TestCase.settings = settings(max_examples=15, stateful_step_count=10)
TestLog = LogMachine.TestCase
