"""The report: what it says, that it says what is missing, and how it looks in a real browser."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from infra.artifacts import staged
from infra.consent import QueryRow
from infra.querylog import QueryLog
from infra.registry import Registry, open_registry
from infra.rollout_store import RolloutStore
from infra.rollouts import Joined, Left, Seen
from infra.settings import Settings
from infra.views.acceptance import Served
from infra.views.gate import headline, write_files
from infra.windows import Window
from models.types import GateReport, RolloutParams
from tasks.measure.compare_traffic import compare_acceptance
from tasks.measure_draft import first_report
from tasks.write_report import sum_up, write_report
from tests.conftest import judge
from tests.tags import draft_tags
from tests.tasks.made import row_of

pytestmark = pytest.mark.slow

WINDOW = Window(first_seq=1, last_seq=60, num_rows=60, sha256="1" * 64, owner="anyone")
ATTACK = '<script>document.title = "taken"</script>'
SIZE = (1000, 1400)
SINCE_MS = 1_700_057_000_000  # 15 November 2023, 14:03:20 UTC
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page, fails on tags that don't match, and keeps what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open += [] if tag in VOID else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text.setdefault(self._open[-1], []).append(data)


@pytest.fixture(scope="module")
def settings(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A home with four drafts, a log of their requests with a swap in it, and a demonstration."""
    settings = Settings(home=tmp_path_factory.mktemp("report"))
    shutil.copy(store, settings.home)
    registry = open_registry(settings)
    passed = judge({"chat": 0.05, "code": 0.5})
    refused = judge({"chat": -0.2, "code": 0.1}, challenger=2, left_out=("sql",))
    reports = {
        1: first_report(judge({"chat": 0.0}).measured, 3),
        2: passed.origin(1, WINDOW),
        3: refused.origin(2, WINDOW).model_copy(update={"reasons": (ATTACK,)}),
    }
    register(registry, settings, "target", None, target_name="SmolLM2-135M-Instruct")
    register(registry, settings, "draft", reports[1], tau='{"chat": 1.5}', seed="7")
    trained = {"window_first_seq": "1", "window_last_seq": "60", "window_sha256": "1" * 64, "parent": "1"}
    register(registry, settings, "draft", reports[2], gate="passed", tau='{"chat": 1.55, "code": 2.0}', **trained)
    register(registry, settings, "draft", reports[3], gate="refused", gate_reasons=ATTACK, parent="2")
    register(registry, settings, "draft", None, gate="passed", gate_reasons="", parent="2")
    registry.promote("target", 1)
    for number in (1, 2, 4):
        registry.promote("draft", number)
    registry.revert("draft", 4, f"another output {ATTACK}")
    log = QueryLog(settings.querylog)
    log.append([row(number) for number in range(1, 81)], dropped=3)
    log.windows.commit(log.windows.claim("refresh", max_rows=60))
    demonstrate(settings.home / "demo" / "tiny-0123")
    return settings


def register(registry: Registry, settings: Settings, kind: str, report: GateReport | None, **tags: str) -> None:
    made = settings.home / "made" / f"{kind} {len(registry.versions(kind))}"
    with staged(made) as directory:
        (directory / "weights").write_text(made.name)
    lineage = {**draft_tags(), "target_version": "1", "git_commit": "abcdef012345", **tags}
    evidence = settings.home / "made" / f"evidence {made.name}"
    evidence.mkdir()
    files = [] if report is None else write_files(report, evidence)
    registry.register(kind, made, lineage, {}, files, "" if report is None else headline(report))


def row(number: int) -> QueryRow:
    """Row 51 is the first that draft 2 drafted for; each ninth was served without speculation."""
    drafted = {"drafted": [3] * 8, "accepted": [number % 3, 1, 0, 2 if number > 50 else 0] * 2}
    return row_of(
        f"row{number}",
        time_ms=SINCE_MS + 60_000 * number,
        domain="code" if number % 2 else "chat",
        consent="full" if number % 5 else "metadata",
        draft_version=2 if number > 50 else 1,
        per_token_ms=8.0,
        speculating=number % 9 > 0,
        **(drafted if number % 9 else {}),
    )


def demonstrate(folder: Path, is_finished: bool = True) -> None:
    """Leave what the demonstration leaves of 20 prompts."""
    folder.mkdir(parents=True)
    phases = {}
    for phase, version, accepted in (("before", "1", (1, 0)), ("after", "2", (2, 1))):
        said = {"draft_version": version, "drafted_per_step": [3, 3], "accepted_per_step": accepted}
        phases[phase] = [
            {"prompt_id": str(number), "domain": "code" if number % 2 else "chat", "token_ids": [number], **said}
            for number in range(20)
        ]
        (folder / f"{phase}.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in phases[phase]))
    result = {
        "recipe": "tiny",
        "num_draft_tokens": 3,
        "commit": "abcdef012345",
        "device": "cpu, x86_64",
        "swaps": 1,
        "domains": compare_acceptance(phases["before"], phases["after"]),
        "outputs": {"num_compared": 20, "verdicts": {"equal": 20}, "threshold": 0.1},
        "tokens_per_s": {"on": {"chat": 120.0, "code": 130.0}, "off": {"chat": 90.0, "code": 91.0}},
        "requests": {"ok": 40},
    }
    if is_finished:
        (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def html(settings: Settings) -> str:
    return write_report.fn(settings).read_text()


def section(html: str, name: str) -> str:
    """Return a section's text without its tags."""
    [found] = re.findall(rf'<section id="{name}">(.*?)</section>', html, re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", found).split())


def test_the_page_is_sound_and_loads_nothing(html: str) -> None:
    page = Page(html)
    assert "script" not in [tag for tag, _ in page.tags]
    assert not [word for word in ("http://", "https://", "url(", "@import") if word in html]
    loading = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert loading == ["data:,"]


def test_headings_and_tables_can_be_read_aloud(html: str) -> None:
    page = Page(html)
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("table") == tags.count("caption") > 5
    assert all(attributes.get("scope") in ("row", "col") for tag, attributes in page.tags if tag == "th")
    assert all(text.strip() for text in page.text["th"])
    assert tags.count("svg") == tags.count("desc") == 5
    keys = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("acceptance", "72 of the log's last 80 rows have acceptance figures"),
        ("acceptance", r"Draft 2 took over at 2023-11-15 14:54 UTC\."),
        ("acceptance", "2023-11-15 14:04 to 2023-11-15 15:23 UTC"),
        ("speed", r"chat 10 1\.50 \(1\.50 to 1\.50\) 2\.50"),
        ("speed", "chat 120.0 90.0 1.33×"),
        ("drafts", r"4 quarantined \S+ \S+ 2 – passed"),
        ("drafts", r"3 never promoted \S+ \S+ 2 – refused"),
        ("drafts", r"2 champion \S+ \S+ 1 1–60 passed chat 1\.55, code 2\.00"),
        ("drafts", "1 was champion"),
        ("drafts", "seed 7"),
        ("drafts", "code revision abcdef012345"),
        ("log", "rows dropped 3"),
        ("serving", "SmolLM2-135M-Instruct, version 1"),
        ("serving", "champion draft version 2"),
        ("serving", "not running; start it with redraft serve or redraft up"),
        ("serving", "last gate draft 3. Gate undecided: &lt;script&gt;"),
    ],
)
def test_a_section_tells_what_a_reader_decides_by(html: str, name: str, told: str) -> None:
    assert re.search(told, section(html, name))


def test_acceptance_is_told_by_domain_and_draft_and_refreshes_are_not_missed_where_there_were_some(html: str) -> None:
    assert len(re.findall(r"(chat|code) [12] \d+ \d\.\d\d \(", section(html, "acceptance"))) == 4
    assert "No refresh yet" not in section(html, "drafts")


def test_sums_are_of_steps_and_times_are_medians() -> None:
    requests = [Served(1, 1, "chat", (3, 3), (0, 1), 8.0), Served(2, 1, "chat", (3,), (2,), 4.0)]
    found = sum_up("chat", 1, requests)
    assert (found.num_requests, found.tau.value, found.per_token_ms) == (2, 2.0, 6.0)
    assert found.rate.value == pytest.approx(1 / 3)


def test_evidence_is_told_for_each_draft_and_its_absence_too(html: str) -> None:
    fourth, third, second, first = re.findall(r"Draft \d: .*?(?=Draft \d: |$)", section(html, "gates"))
    assert "Quarantined: another output" in fourth and "were not kept" in fourth
    assert "Without a conversation to score: sql" in third
    assert "the challenger may lose more than 5.0% of the best τ in chat" in third
    assert re.search(r"chat 120 1\.499 1\.549 1\.499 – \+3\.3% \+\d\.\d% -5\.0% keeps its floor", second)
    assert "So it may serve." in second
    assert "There was no champion to compare it with" in first


def test_attached_servers_are_what_serves_and_no_service_of_ours_is_missed(settings: Settings, tmp_path: Path) -> None:
    names = ("http://a:8000", "http://b:8000")
    store = RolloutStore(settings.querylog, "attached servers", RolloutParams())
    store.tell(Joined(names=names), Seen(name=names[0], version="2-abc", proven=True, failed={}))
    try:
        html = write_report.fn(settings, tmp_path / "page.html").read_text()
    finally:
        store.tell(Left(names=names))
    serving = section(html, "serving")
    assert "attached server http://a:8000 serving, draft 2-abc" in serving
    assert "attached server http://b:8000 starting, draft unknown" in serving
    assert "not running" not in html
    assert re.search(r"Attached servers</dt>.*?1 of 2 serve</dd>.*?draft 2</dd>", html, re.DOTALL)


def test_text_from_the_registry_stays_text(html: str) -> None:
    assert ATTACK not in html
    assert html.count("&lt;script&gt;") >= 3


def test_an_empty_home_says_what_is_missing(tmp_path: Path) -> None:
    html = write_report.fn(Settings(home=tmp_path)).read_text()
    Page(html)
    for name, told in (
        ("serving", "none yet; run: redraft build --recipe FILE"),
        ("acceptance", "The query log has no request"),
        ("speed", "not measured here yet"),
        ("drafts", "No draft is registered yet"),
        ("gates", "none was gated"),
    ):
        assert told in section(html, name)
    assert "<svg" not in html


def test_an_unfinished_demonstration_and_a_first_draft_alone_are_told_as_such(store: Path, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    shutil.copy(store, tmp_path)
    demonstrate(settings.home / "demo" / "tiny", is_finished=False)
    register(open_registry(settings), settings, "draft", None)
    html = write_report.fn(settings).read_text()
    assert "is not finished" in section(html, "speed")
    assert "No refresh yet" in section(html, "drafts")
    assert "took over at" not in section(html, "acceptance")


def test_a_folder_that_is_not_there_is_refused_and_nothing_is_left(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        write_report.fn(settings, tmp_path / "none" / "page.html")
    assert list(tmp_path.iterdir()) == []


def opened(browser: str, page: Path, picture: Path) -> tuple[str, str]:
    """Open a page in a browser, take a picture, and return the DOM and the log."""
    told = ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--force-device-scale-factor=1"]
    told += [f"--window-size={SIZE[0]},{SIZE[1]}", f"--user-data-dir={picture.with_suffix('.profile')}"]
    told += ["--enable-logging=stderr", f"--screenshot={picture}", "--dump-dom", page.as_uri()]
    argv = [browser, "--headless=new", "--no-sandbox", *told]  # it refuses to run as root with a sandbox
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    return ended.stdout, ended.stderr


def test_a_browser_shows_the_page_without_a_complaint(
    settings: Settings, html: str, browser: str, screenshots: Path
) -> None:
    from matplotlib.image import imread

    picture = screenshots / "report.png"
    dom, log = opened(browser, settings.home / "report.html", picture)
    assert "CONSOLE" not in log
    page = Page(dom)
    shown = [attributes.get("id") for tag, attributes in page.tags if tag == "section"]
    assert shown == ["serving", "acceptance", "speed", "drafts", "gates", "log"]
    assert page.text["title"][0].startswith("redraft report")  # no script has changed it
    assert [tag for tag, _ in page.tags].count("polyline") >= 8
    assert picture.read_bytes().startswith(b"\x89PNG")
    pixels = imread(picture)
    assert pixels.shape[:2] == SIZE[::-1]
    inked = (abs(pixels[..., :3] - pixels[0, 0, :3]).max(axis=-1) > 0.1).mean(axis=1)
    assert (inked > 0).mean() > 0.3
    assert inked.max() < 1


@pytest.mark.parametrize("width", [400, 1000])
def test_nothing_is_cut_off_and_nothing_needs_to_be_moved_sideways_on_a_phone_either(
    html: str, browser: str, tmp_path: Path, width: int
) -> None:
    """The page in a frame of so many pixels, asked by a script of the page around it."""
    inner = escape(
        re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", html).replace("<details>", "<details open>")
    )
    outer = tmp_path / "phone.html"
    outer.write_text(
        f'<iframe id="phone" width="{width}" height="800" style="border: 0" srcdoc="{inner}"></iframe><script>'
        "document.getElementById('phone').onload = (event) => { const page = event.target.contentDocument; "
        "const parts = [...page.querySelectorAll('html, .scroll, figure')]; "
        "const wide = parts.filter((part) => part.scrollWidth > part.clientWidth); "
        "document.title = wide.length + ' of ' + page.documentElement.clientWidth + ': ' "
        "+ wide.map((part) => part.tagName + part.textContent.slice(0, 60)); };</script>"
    )
    dom, _ = opened(browser, outer, tmp_path / "phone.png")
    assert re.search("<title>(.*?)</title>", dom, re.DOTALL).group(1) == f"0 of {width}: "


def test_a_page_that_asked_for_more_would_be_stopped_and_noticed(html: str, browser: str, tmp_path: Path) -> None:
    asking = tmp_path / "asking.html"
    asking.write_text(html.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png" alt=""><script>1</script>'))
    _, log = opened(browser, asking, tmp_path / "asking.png")
    assert log.count("violates the following Content Security Policy") == 2
    assert "CONSOLE" in log
