"""The demonstration without a service: what a kill leaves, and the time of its stages."""

from pathlib import Path

import pytest

from tasks.measure import demonstration
from tasks.measure.demo_files import answers_of


def test_an_answer_that_a_kill_cut_short_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "before.jsonl").write_text('{"prompt_id": "a"}\n{"prompt_id": "b"}\n{"prompt_')
    assert [row["prompt_id"] for row in answers_of(tmp_path, "before")] == ["a", "b"]
    assert answers_of(tmp_path, "after") == []


def test_a_stage_takes_until_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 4.0, 9.5, 11.0])
    monkeypatch.setattr(demonstration.time, "monotonic", lambda: next(moments))
    stages = demonstration.Stages()
    for name in ("build", "serve", "result"):
        stages.start(name)
    assert stages.seconds == {"build": 3.0, "serve": 5.5}
    assert stages.total_s() == 11.0
