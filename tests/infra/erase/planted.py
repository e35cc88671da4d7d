"""A home in which a person's text is planted wherever redraft may leave any, and a search for it."""

import bz2
import gzip
import json
import logging
import lzma
import os
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from infra.artifacts import path_of, publish, staged
from infra.consent import QueryRow, subject_of
from infra.environment import environment_of
from infra.post_promotion import POST_PROMOTION, WORK
from infra.querylog import CapturedFiles, QueryLog
from infra.registry import open_registry
from infra.regression_sets import Change
from infra.settings import Settings, load_settings
from tests.tags import draft_tags

WHO = "zoë"
SUBJECT = str(subject_of(None, WHO))
MARK = 'My cat Žofka "the 7391st" sleeps\non a vermilion piano'
SHARED = "You are a helpful assistant, and you answer in one sentence."
PARTS = ("train", "held_out", "regression")
SECRET = bytes(32)
GROUP = "5ec7e7" + "9" * 58


def planted_row(number: int, subject: str | None = SUBJECT, time_ms: int = 1_000) -> QueryRow:
    """Return a row of the person or of somebody else."""
    mine = subject == SUBJECT
    text = f"{MARK}, number {number}" if mine else f"How tall is the tower of Pisa, and who built it? ({number})"
    start = 30_000 if mine else 500
    return QueryRow(
        id=f"{'mine' if mine else 'other'}-{number}",
        time_ms=time_ms,
        subject=subject,
        group=GROUP if mine else "0" * 64,
        domain="chat",
        consent="full",
        scrubber_revision=2,
        target_version=1,
        draft_version=1,
        prompt=f"<|im_start|>system\n{SHARED}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n",
        completion=f"{text}? Indeed: {text}.",
        prompt_ids=[start + number + place for place in range(40)],
        completion_ids=[start + 5_000 + number + place for place in range(40)],
        sampling={"temperature": 0.0},
        finish_reason="stop",
        speculating=False,
    )


def make_home(home: Path, store: Path, address: str = "") -> Settings:
    """Make a home of 12 rows, 4 of them the person's, with two windows, three drafts, caches, logs and databases.

    The rows are in a file of the home, or at the address.
    """
    settings = load_settings(environment_of(home))
    if address:
        settings = settings.model_copy(update={"querylog": address})
    home.mkdir(exist_ok=True)
    shutil.copy(store, home / "mlflow.db")
    log = QueryLog(settings.querylog)
    rows = [planted_row(number, SUBJECT if number % 3 == 0 else "somebody") for number in range(12)]
    log.append(rows[:6])
    first = log.windows.claim("refresh 1", max_rows=6)
    assert first is not None
    log.windows.commit(first)
    log.append(rows[6:])
    assert log.windows.claim("refresh 2", max_rows=6) is not None  # open, as a run that was killed leaves it
    second = log.rows(7, 12)
    log.sketches.keep(SECRET, [(row.seq or 0, b"turn", bytes(8)) for row in log.rows(1, 12)])
    log.regression_sets.apply(Change([1, 2], []))

    windows = {"aaaa": {"train": rows[1:4], "held_out": rows[4:6], "regression": rows[:1]}}
    windows["bbbb"] = {"train": [rows[3], *second[:3]], "held_out": second[3:], "regression": rows[:1]}
    for name, parts in windows.items():
        snapshot(settings, name, parts)
    log.erasures.record_reads("aaaa", {part: [row.id for row in of_part] for part, of_part in windows["aaaa"].items()})
    log.erasures.record_reads(
        "bbbb", {"replay": [rows[3].id], "train": [row.id for row in second[:3]], "regression": [rows[0].id],
                 "held_out": [row.id for row in second[3:]]},
    )  # fmt: skip
    snapshot(settings, "cccc", {"train": rows[1:3], "held_out": [], "regression": []})  # nobody's of ours
    _register(settings)
    _caches(settings, rows)
    _elsewhere(home, rows[0])
    log.close()
    return settings


def snapshot(settings: Settings, name: str, parts: dict[str, list[QueryRow]]) -> None:
    """Write a snapshot as a refresh does."""
    with staged(settings.artifacts / "window" / name) as directory:
        for part in PARTS:
            lines = [json.dumps(sample(row)) + "\n" for row in parts[part]]
            (directory / f"{part}.jsonl").write_text("".join(lines))


def sample(row: QueryRow) -> dict[str, object]:
    return {
        "id": row.id,
        "domain": row.domain,
        "prompt_ids": row.prompt_ids,
        "completion_ids": row.completion_ids,
        "temperature": 0.0,
        "cluster": "c",
    }


def _register(settings: Settings) -> None:
    """Register a first draft, one trained on window aaaa, one that goes on with bbbb, and one from elsewhere."""
    registry = open_registry(settings)
    uri = {name: (settings.artifacts / "window" / name).resolve().as_uri() for name in ("aaaa", "bbbb")}
    window = {"window_first_seq": "1", "window_last_seq": "6", "window_sha256": "w", "window_uri": uri["aaaa"]}
    later = {"window_first_seq": "7", "window_last_seq": "12", "window_sha256": "x", "window_uri": uri["bbbb"]}
    made = [{}, {"parent": "1", **window}, {"parent": "2", "continues": "2", **later}, {"gate_data": uri["aaaa"]}]
    made.append({"parent": "3", "window_first_seq": "13", "window_last_seq": "14", "window_sha256": "y"})
    for number, tags in enumerate(made):
        with staged(settings.home / "made" / str(number)) as directory:
            (directory / "model.safetensors").write_bytes(bytes([number]))
        registry.register("draft", directory.parent / str(number), draft_tags() | tags)
    shutil.rmtree(settings.home / "made")


def _caches(settings: Settings, rows: list[QueryRow]) -> None:
    for name, of_name in {"s1": rows[:3], "s2": rows[1:3]}.items():
        with staged(settings.artifacts / "scores" / name) as directory:
            (directory / "scores.json").write_text(json.dumps([{"id": row.id, "accepted": 1.0} for row in of_name]))
    work = settings.artifacts / "work"
    for name in ("hidden", "answers", "dead"):
        (work / name).mkdir(parents=True)
    (work / "hidden" / "states.bin").write_bytes(b"\x01\x02" * 64)
    (work / "answers" / "answers.jsonl").write_text(json.dumps({"id": "prompt-1", "completion_ids": [1, 2, 3]}) + "\n")
    (work / "dead" / "answers.jsonl").write_text(json.dumps(sample(rows[0])) + "\n")
    files = CapturedFiles(settings.beside_log)
    files.make()
    for row in (*rows[:3], planted_row(99, "somebody")):  # the last one did not come to the log
        files.path_of(row.id).write_bytes(row.model_dump_json().encode())
        os.utime(files.path_of(row.id), (1, 1))
    torn = settings.artifacts / "window" / ".staging-dddd-0a0b0c0d0a0b0c0d"
    torn.mkdir()
    (torn / "train.jsonl").write_text(json.dumps(sample(rows[0])) + "\n")
    (settings.home / POST_PROMOTION / WORK).mkdir(parents=True)
    (settings.home / POST_PROMOTION / WORK / "rows.json").write_text(json.dumps(rows[3].model_dump()))


def _elsewhere(home: Path, row: QueryRow) -> None:
    """Plant text in logs, compressed ones too, and in a database of Prefect's: in a value and in a free page."""
    (home / "logs").mkdir()
    logger = logging.getLogger("planted")
    handler = logging.FileHandler(home / "logs" / "service.log", encoding="utf-8")
    logger.addHandler(handler)
    logger.propagate = False
    logger.error("the tower of Pisa is fine; bad request: %s", row.completion)
    logger.error("as JSON: %s; ids %s", json.dumps({"text": row.completion}), row.prompt_ids)
    logger.error("twice: %s", json.dumps(json.dumps({"text": row.completion})))
    logger.removeHandler(handler)
    handler.close()
    for name, module in {"old.log.gz": gzip, "old.log.xz": lzma, "old.log.bz2": bz2}.items():
        with module.open(home / "logs" / name, "wt", encoding="utf-8") as file:
            file.write(f"kept line\n{row.prompt}\nkept too\n")
    (home / "prefect" / "results").mkdir(parents=True)
    result = {"result": {"prompt": row.prompt, "ids": row.completion_ids}}
    (home / "prefect" / "results" / "result").write_text(json.dumps(result, separators=(",", ":")))
    with closing(sqlite3.connect(home / "prefect" / "prefect.db", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE log (id INTEGER PRIMARY KEY, message VARCHAR NOT NULL, data JSON)")
        data = json.dumps({"prompt": row.prompt, "ids": row.prompt_ids, "kept": "the tower of Pisa"})
        db.execute("INSERT INTO log (message, data) VALUES (?, ?), ('fine', '{}')", (f"failed on {row.prompt}", data))
        db.executemany(
            "INSERT INTO log (message) VALUES (?)", [(f"{row.completion} {number}",) for number in range(50)]
        )
        db.execute("DELETE FROM log WHERE id > 2")  # stays in free pages


def planted_in(home: Path) -> list[str]:
    """Return the files of a home in which the person's text is found, in whatever form."""
    return sorted(
        str(file.relative_to(home))
        for file in home.rglob("*")
        if file.is_file() and any(needle in content for content in _contents(file) for needle in needles())
    )


def needles() -> Iterator[bytes]:
    words = ('Žofka "the 7391st"', "Žofka", "vermilion piano", "7391st")
    for text in words:
        once = json.dumps(text)[1:-1]
        for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], once, json.dumps(once)[1:-1], repr(text)[1:-1]):
            yield form.encode()
    yield from (f"mine-{number}".encode() for number in range(12))
    yield GROUP.encode()
    for number in range(0, 12, 3):
        for start in (30_000, 35_000):
            ids = [start + number + place for place in range(18, 22)]
            yield ", ".join(map(str, ids)).encode()
            yield ",".join(map(str, ids)).encode()
            yield struct.pack("<4i", *ids)
            yield struct.pack("<4q", *ids)


def _contents(file: Path) -> Iterator[bytes]:
    yield file.read_bytes()
    for module in (gzip, bz2, lzma):
        with suppress(OSError, EOFError, lzma.LZMAError), module.open(file, "rb") as opened:
            yield opened.read()


def check_erased(settings: Settings) -> None:
    """Assert that the person is nowhere in a home, that all else is there, and that nothing in it trips a later run."""
    home, log = settings.home, QueryLog(settings.querylog)
    assert planted_in(home) == []
    assert [row.id for row in log.rows(1, 99)] == [f"other-{number}" for number in range(12) if number % 3]
    assert log.erasures.unfinished() == []
    certificate = json.loads((home / "erasures" / "1.json").read_text())
    assert (certificate["rows"], certificate["subjects"]) == (4, [SUBJECT])
    assert certificate["drafts"] == {
        "2": {"regression": 1, "train": 1},
        "3": {"held_out": 1, "regression": 1, "replay": 1, "train": 1},
        "4": {"regression": 1, "train": 1},
    }
    assert certificate["descendants"] == [5]
    assert [(window["first_seq"], window["last_seq"]) for window in certificate["windows"]] == [(1, 6), (7, 12)]
    assert (certificate["regression_rows"], certificate["sketches"]) == ({"chat": 1}, 4)
    folder = settings.artifacts / "window"
    assert sorted(path.name for path in folder.iterdir()) == ["aaaa.1", "bbbb.1", "cccc"]
    registry = open_registry(settings)
    for one in certificate["snapshots"]:
        left = publish(path_of(one["became"]), "samples")
        assert (left.sha256, left.sha256 != one["sha256"]) == (one["became_sha256"], True)
    assert registry.get("draft", 2).tags["window_uri"] == registry.get("draft", 4).tags["gate_data"]
    assert registry.get("draft", 2).tags["window_uri"].endswith("/aaaa.1")
    assert registry.get("draft", 3).lineage.window.uri.endswith("/bbbb.1")
    kept = [json.loads(line)["id"] for line in (folder / "bbbb.1" / "train.jsonl").read_text().splitlines()]
    assert kept == ["other-7", "other-8"]
    assert sorted(path.name for path in (settings.artifacts / "scores").iterdir()) == ["s2"]
    assert sorted(path.name for path in (settings.artifacts / "work").iterdir()) == ["answers"]
    files = CapturedFiles(settings.beside_log)
    assert sorted(files.folder.iterdir()) == sorted(map(files.path_of, ("other-1", "other-2")))
    assert files.folder.name in certificate["removed"]
    assert "the tower of Pisa is fine" in (home / "logs" / "service.log").read_text()
    with gzip.open(home / "logs" / "old.log.gz", "rt") as file:
        lines = file.read().splitlines()
    assert (lines[0], lines[-1]) == ("kept line", "kept too")
    result = json.loads((home / "prefect" / "results" / "result").read_text())
    assert SHARED in result["result"]["prompt"] and set(result["result"]["ids"]) == {0}
    with closing(sqlite3.connect(home / "prefect" / "prefect.db")) as db:
        ((message, data), (fine, _)) = db.execute("SELECT message, data FROM log ORDER BY id").fetchall()
    assert (message[:10], fine, json.loads(data)["kept"]) == ("failed on ", "fine", "the tower of Pisa")
    assert os.stat(home / "erasures" / "1.json").st_mode & 0o077 == 0
    log.close()
