"""The log's rate, with the real recorder and a real file: nothing is lost that was not counted."""

import pytest

from infra.consent import QueryRow
from infra.querylog import QueryLog
from models.targets.random import byte_tokenizer
from tests.benchmarks import log_rate
from tests.benchmarks.query_log import measure_rate

pytestmark = pytest.mark.slow

TOKENIZER = byte_tokenizer()


def row(number: int, **changed: object) -> QueryRow:
    ids = TOKENIZER.encode(f"question {number}", add_special_tokens=False)
    fields = {
        "id": f"row-{number}",
        "time_ms": 0,
        "domain": "chat",
        "consent": "full",
        "scrubber_revision": 1,
        "target_version": 1,
        "draft_version": 1,
        "prompt_ids": ids,
        "completion_ids": ids,
        "drafted": [2, 2],
        "accepted": [1, 0],
        "drafted_ids": [[1, 2], [3, 4]],
        "sampling": {"temperature": 0.0},
        "finish_reason": "stop",
        "speculating": True,
    }
    return QueryRow(**{**fields, **changed})


def test_every_row_that_is_offered_is_written_or_counted_as_dropped(tmp_path):
    found = measure_rate([row(number) for number in range(5)], TOKENIZER, tmp_path / "new.db", 600)
    assert found["rows_per_s"] > 0
    assert (found["dropped_while_held"], found["lost"]) == (0, 0)
    assert found["written"] + found["dropped"] == found["offered"] == 600
    log = QueryLog(tmp_path / "new.db")
    kept = log.rows(1, 2000)
    log.close()
    assert len(kept) == 600 + found["written"]
    assert (kept[0].drafted_ids, kept[0].sampling) == ([[1, 2], [3, 4]], {"temperature": 0.0})


def test_a_burst_above_both_queues_is_dropped_and_counted(tmp_path):
    found = measure_rate([row(0)], TOKENIZER, tmp_path / "new.db", 6000)
    assert found["dropped"] > 0
    assert found["lost"] == 0


def test_rows_without_text_are_no_material(tmp_path):
    bare = row(0, consent="metadata", prompt_ids=None, completion_ids=None, drafted_ids=None)
    with pytest.raises(ValueError, match="none of 1 rows holds token ids"):
        measure_rate([bare], TOKENIZER, tmp_path / "new.db", 10)


def test_of_rows_that_two_processes_write_none_is_lost(tmp_path):
    assert log_rate.measure(tmp_path / "new.db", num_writers=2, num_rows=30) > 0
    log = QueryLog(tmp_path / "new.db")
    assert {row.id for row in log.latest(99)} == {f"{writer}-{number}" for writer in "ab" for number in range(30)}
    log.close()
