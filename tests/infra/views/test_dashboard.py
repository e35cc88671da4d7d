import re
import subprocess
from datetime import UTC, datetime, timedelta, timezone
from html import escape, unescape
from pathlib import Path

import pytest

from infra.status import ServiceStatus
from infra.views import charts
from infra.views.dashboard import dashboard
from tests.infra.statuses import STATUS

NOW = datetime(2026, 3, 1, 12, 30, 5, tzinfo=timezone(timedelta(hours=2)))
STYLE = Path(charts.__file__).with_name("charts.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in STYLE.split("@media")[:2])
SERIES = [f"c{number}" for number in range(6)]
TEXT, DRAWN = 4.5, 3.0  # the least contrast of WCAG 2.2, level AA, for text and for what is drawn
# A page in a frame of some width, which says how wide it is; the page's own policy runs no script.
FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><iframe width="{width}" height="900" id="frame"
srcdoc="{html}"></iframe><script>frame.onload = () => {{ const shown = frame.contentWindow;
document.title = [shown.document.documentElement.scrollWidth, shown.matchMedia("(prefers-color-scheme: dark)").matches,
shown.getComputedStyle(shown.document.body).backgroundColor].join(" "); }}</script>"""


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


def contrast(first: str, second: str) -> float:
    """Return WCAG's contrast of two colours, from 1 to 21."""
    brighter, darker = sorted(map(_luminance, (first, second)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_charts_can_be_read_in_both_colour_schemes(colours: dict[str, str]) -> None:
    assert colours.keys() == LIGHT.keys() >= {*SERIES, "page", "panel"}
    for name in ("ink", "soft", "good", "bad", "c0"):  # the last one is of links
        assert contrast(colours[name], colours["page"]) >= TEXT, name
    assert contrast(colours["ink"], colours["panel"]) >= TEXT
    for name in (*SERIES, "mark"):
        assert contrast(colours[name], colours["page"]) >= DRAWN, name


@pytest.mark.slow
@pytest.mark.parametrize(("width", "is_dark"), [(400, True), (1200, False)])
def test_a_page_is_as_wide_as_its_window_and_of_the_scheme_that_its_reader_likes(width, is_dark, browser, tmp_path):
    html = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", dashboard(STATUS, datetime.now(UTC)))
    file = tmp_path / "frame.html"
    file.write_text(FRAME.format(width=width, html=escape(html)))
    argv = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    argv += [f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={int(not is_dark)}"]
    ended = subprocess.run(
        [*argv, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    red, green, blue = (int((DARK if is_dark else LIGHT)["page"][at : at + 2], 16) for at in (1, 3, 5))
    assert f"<title>{width} {str(is_dark).lower()} rgb({red}, {green}, {blue})</title>" in ended.stdout
