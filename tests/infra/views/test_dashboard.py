from datetime import datetime, timedelta, timezone
from html import unescape

import pytest

from infra.status import ServiceStatus
from infra.views.dashboard import dashboard
from tests.infra.statuses import STATUS

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=2)))


def page_of(**changed: object) -> str:
    return dashboard(ServiceStatus.model_validate(STATUS.model_dump() | changed), NOW)


def test_it_says_what_serves_and_what_that_gives() -> None:
    text = unescape(page_of(draft_version=4, uptime_s=3725.4))
    for told in (
        "<title>target: draft 4</title>",
        "since its start 1:02:05 ago, seen 2026-03-01 10:30:05 UTC",
        "serving, the registry names 4",
        "1 tokens a step: pays",
        "speculation speeds chat up 1.50× (1.40 to 1.60); 75.0 tokens/s of one request, 50.0 without",
        "2-0123456789ab: fc.weight holds NaN",
        "7 with status 200, 1 with status 429",
        "5 written, 1 lost",
        "<svg",
    ):
        assert told in text
    cells = ["chat", "9", "1.75", "25.0%"]
    at = [text.index(f">{cell}<", text.index("drafted alone, by domain")) for cell in cells]
    assert at == sorted(at)


@pytest.mark.parametrize(("fallback", "told"), [(None, "switched off by an operator"), ("no good draft",) * 2])
def test_it_says_why_speculation_is_off(fallback: str | None, told: str) -> None:
    assert f"off: {told}" in page_of(speculating=False, fallback=fallback)


def test_a_service_that_has_just_started_has_a_page_too() -> None:
    none_yet = dict.fromkeys(("draft_version", "champion", "throughput", "swap_ms"))
    names = ("speed", "acceptance", "requests", "reconciler", "captured", "refused", "postponed")
    empty = page_of(**none_yet, **{name: {} for name in names})
    for told in ("No speed yet", "drafted no request alone yet", "target: draft none", "nothing planned yet"):
        assert told in empty
    assert "<svg" not in empty


def test_it_loads_nothing_and_what_it_quotes_is_text() -> None:
    page = page_of(refused={"2": '<script src="//evil.example/x.js">'}, fault="<img src=x>", replacement="<b>")
    assert not [tag for tag in ("<script", "<img", "<b>") if tag in page]
    assert "default-src 'none'" in unescape(page)
