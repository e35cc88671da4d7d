"""Sketches of the log's rows, by which conversations are clustered: made once for each row, and erased with it.

They are hashes under the home's secret; those under another one count as missing.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from infra.logfile import LogFile


class SketchedRow(NamedTuple):
    """A row of full consent, and its sketch as `models.evaluation.clusters` made it."""

    seq: int
    domain: str
    group: str | None
    key: str | None
    time_ms: int
    turn: bytes
    grams: bytes


class Sketches(LogFile):
    """The sketches of a log."""

    def missing(self, secret: bytes) -> Iterator[tuple[int, list[int]]]:
        """Yield seq and prompt tokens of each row with full consent and tokens that has no sketch, by seq."""
        query = """SELECT seq, json_extract(body, '$.prompt_ids') FROM rows WHERE consent = 'full' AND seq NOT IN
            (SELECT seq FROM sketches WHERE secret = ?) ORDER BY seq"""
        for seq, prompt_ids in self.connection().execute(query, (_name(secret),)):
            if prompt_ids is not None:
                yield seq, json.loads(prompt_ids)

    def keep(self, secret: bytes, made: Iterable[tuple[int, bytes, bytes]]) -> None:
        """Keep seq, turn and grams of each; what was erased meanwhile is left out."""
        query = """INSERT OR REPLACE INTO sketches SELECT ?1, ?2, ?3, ?4
            WHERE EXISTS (SELECT 1 FROM rows WHERE seq = ?1)"""
        with self.transaction() as db:
            db.executemany(query, ((seq, _name(secret), turn, grams) for seq, turn, grams in made))

    def read(self, secret: bytes) -> list[SketchedRow]:
        """Return all that have one, by seq."""
        query = """SELECT seq, domain, group_hash, json_extract(body, '$.key'), time_ms, turn, grams FROM sketches
            JOIN rows USING (seq) WHERE secret = ? ORDER BY seq"""
        return [SketchedRow(*columns) for columns in self.connection().execute(query, (_name(secret),))]


def _name(secret: bytes) -> str:
    return hashlib.sha256(b"sketches" + secret).hexdigest()[:16]
