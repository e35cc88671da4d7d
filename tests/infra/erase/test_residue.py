"""Files and databases that others use while a text is removed from them."""

import gzip
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import pytest

from infra.erase import residue
from infra.erase.search import Search
from tests.infra.rows import row

TEXT = "a long sentence that nobody else ever wrote to the service"
ROWS = [row("his").model_copy(update={"prompt": TEXT})]


class Replacing(Search):
    """Replaces a file by another one as soon as its content was read."""

    def __init__(self, file: Path, content: bytes) -> None:
        super().__init__(ROWS)
        self._file, self._content = file, content

    def spans(self, content: bytes) -> list[tuple[int, int]]:
        if self._content:
            newer = self._file.with_name("newer")
            newer.write_bytes(self._content)
            newer.replace(self._file)
            self._content = b""
        return super().spans(content)


def test_a_file_that_is_replaced_while_it_is_redacted_keeps_its_new_content(tmp_path: Path) -> None:
    file = tmp_path / "service.log"
    file.write_text(f"an older log: {TEXT}, and more")
    assert residue._redact_plain(file, Replacing(file, f"rotated: {TEXT}!".encode())) == 2
    assert file.read_text() == f"rotated: {'*' * len(TEXT)}!"


def test_a_packed_file_that_is_replaced_meanwhile_keeps_its_new_content(tmp_path: Path) -> None:
    file = tmp_path / "service.log.gz"
    file.write_bytes(gzip.compress(f"an older log: {TEXT}".encode()))
    assert residue._repack(file, Replacing(file, gzip.compress(f"rotated: {TEXT}!".encode())), gzip) == 1
    assert gzip.decompress(file.read_bytes()).decode() == f"rotated: {'*' * len(TEXT)}!"
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A database as a server keeps it open, with the text in a row."""
    file = tmp_path / "prefect.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE logs (message TEXT)")
        db.execute("INSERT INTO logs VALUES (?)", (TEXT,))
    return file


def test_a_database_is_not_taken_for_clean_while_a_reader_keeps_the_text_in_its_file(database, monkeypatch) -> None:
    monkeypatch.setattr(residue, "BUSY_S", 0.2)
    with closing(sqlite3.connect(database, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM logs").fetchall()
        with pytest.raises(TimeoutError):
            residue._redact_database(database, Search(ROWS))
        reader.execute("COMMIT")
    residue._redact_database(database, Search(ROWS))
    assert TEXT.encode() not in b"".join(path.read_bytes() for path in database.parent.iterdir())


def test_a_writer_of_a_database_is_waited_for(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residue, "POLL_S", 0.01)
    connect = sqlite3.connect
    monkeypatch.setattr(residue.sqlite3, "connect", lambda file, **options: connect(file, **options | {"timeout": 0}))
    with closing(connect(database, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        ends = threading.Timer(0.3, lambda: writer.execute("COMMIT"))
        ends.start()
        assert residue._redact_database(database, Search(ROWS)) == 1
        ends.join()
    assert TEXT.encode() not in database.read_bytes()
