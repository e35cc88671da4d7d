"""How long the stages of the demonstration take."""

import pytest

from tasks.measure import demo_stages


def test_a_stage_takes_until_the_next_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0, 1.0, 4.0, 9.5, 11.0])
    monkeypatch.setattr(demo_stages.time, "monotonic", lambda: next(moments))
    stages = demo_stages.Stages()
    for name in ("build", "serve", "result"):
        stages.start(name)
    assert stages.seconds == {"build": 3.0, "serve": 5.5}
    assert stages.total_s() == 11.0
