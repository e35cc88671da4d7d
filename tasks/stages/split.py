"""Which conversations of a window are trained on, which test what was trained, and which are never trained on.

The unit is a cluster (`models.core.evaluation.clusters`). In each window a keyed hash, which no client can choose, puts
it on a side; a large one is held out in the first window that has it. What was held out in one window is trained on in
the next. What is alike to a member of a regression set (`infra.regression_sets`) is on neither side.
"""

import hmac
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import AutoTokenizer

from infra.querylog import QueryLog
from infra.regression_sets import MAX_CLUSTER_SHARE, MIN_CLUSTER, Conversation
from infra.windows import Window
from models.core.evaluation.clusters import Sketch, join, join_groups, sketch
from models.core.learning.hidden import Sample
from models.tokens import first_turn, turn_marks

BATCH_ROWS = 1000
MOST_OF_GROUP = 4  # rows; more say little that these don't, and each has to be scored
SCORED_FIRST = 0.5  # of a domain's rows; where new large clusters have more, the others are split like small ones


class Clustered(NamedTuple):
    """The log's rows, by seq, and the first samples' clusters by id."""

    rows: list[Conversation]
    first: dict[str, str]


def cluster_log(
    address: Path | str, secret: bytes, target_dir: Path, first: Sequence[Sample], last_seq: int
) -> Clustered:
    """Cluster the rows of a log together with the samples that the served line of drafts began with.

    Rows without a sketch get one in the file, and those after `last_seq` don't count. What a sample was said to belong
    to is its cluster so far.
    """
    log, sketched = QueryLog(address).sketches, _sketcher(target_dir, secret)
    missing = log.missing(secret)
    for start in range(0, len(missing), BATCH_ROWS):
        made = ((seq, sketched(prompt_ids)) for seq, prompt_ids in missing[start : start + BATCH_ROWS])
        log.keep(secret, [(seq, one.turn, one.grams.tobytes()) for seq, one in made])
    rows = [row for row in log.read(secret) if row.seq <= last_seq]
    sketches = [sketched(sample.prompt_ids) for sample in first]
    sketches += [Sketch(row.turn, np.frombuffer(row.grams, dtype=np.uint64)) for row in rows]
    domains = [sample.domain for sample in first] + [row.domain for row in rows]
    alike = join(sketches, domains)
    names = join_groups(alike, domains, [sample.cluster or None for sample in first] + [row.group for row in rows])
    of_rows = zip(rows, names[len(first) :], alike[len(first) :], strict=True)
    return Clustered(
        rows=[Conversation(row.seq, row.domain, row.key, row.time_ms, name, wording) for row, name, wording in of_rows],
        first={sample.id: name for sample, name in zip(first, names, strict=False)},
    )


def cluster_samples(samples: Sequence[Sample], secret: bytes, target_dir: Path) -> list[Conversation]:
    """Cluster samples, in the order of time, as if they were a log's rows, numbered from 1, of one key.

    What each was said to belong to is its cluster so far.
    """
    sketched, domains = _sketcher(target_dir, secret), [sample.domain for sample in samples]
    alike = join([sketched(sample.prompt_ids) for sample in samples], domains)
    names = join_groups(alike, domains, [sample.cluster or None for sample in samples])
    rows = enumerate(zip(domains, names, alike, strict=True), 1)
    return [Conversation(seq, domain, None, 0, name, wording) for seq, (domain, name, wording) in rows]


def _sketcher(target_dir: Path, secret: bytes) -> Callable[[Sequence[int]], Sketch]:
    marks = turn_marks(AutoTokenizer.from_pretrained(target_dir))
    return lambda prompt_ids: sketch(first_turn(prompt_ids, marks), secret)


def held_out_by(
    secret: bytes, rows: Sequence[Conversation], window: Window, held_out_fraction: float, trained: Collection[str]
) -> Callable[[str], bool]:
    """Return the function from a cluster to whether a window tests with it, and does not train on it.

    A large one that is new is held out; of the others HMAC-SHA256 under the home's secret says which are. `rows` are
    the log's up to the window's last one, `trained` clusters that something was trained on outside of it.
    """
    large = unseen_and_large(rows, window, trained, drawn_by(secret))

    def is_held_out(cluster: str) -> bool:
        digest = hmac.digest(secret, f"{window.first_seq} {window.last_seq} {cluster}".encode(), "sha256")
        return cluster in large or int.from_bytes(digest[:8]) / 2**64 < held_out_fraction

    return is_held_out


def drawn_by(secret: bytes) -> Callable[[str], bytes]:
    """Return the function from a cluster, or a row, to its place in a draw that no client can foresee."""
    return lambda name: hmac.digest(secret, b"draw " + name.encode(), "sha256")


def unseen_and_large(
    rows: Sequence[Conversation], window: Window, trained: Collection[str], draw: Callable[[str], bytes]
) -> set[str]:
    """Return the clusters that are scored before they train: those above 5% of a domain in their first window.

    They are too large for a regression set, so that nothing else would say how a draft does on what it has not seen of
    them. A domain that has little else would give its first window nothing to train on: of its large clusters only as
    many wait, in the order of the draw, as reach half of its rows; the others are split like small ones.
    """
    seen = {row.cluster for row in rows if row.seq < window.first_seq} | set(trained)
    new = [row for row in rows if row.seq >= window.first_seq]
    sizes, in_cluster = Counter(row.domain for row in new), Counter((row.domain, row.cluster) for row in new)
    found, waiting = set[str](), Counter[str]()
    for domain, cluster in sorted(in_cluster, key=lambda pair: draw(f"large {pair[1]}")):
        number = in_cluster[domain, cluster]
        is_large = number > max(MIN_CLUSTER, MAX_CLUSTER_SHARE * sizes[domain])
        if is_large and cluster not in seen and waiting[domain] < SCORED_FIRST * sizes[domain]:
            waiting[domain] += number
            found.add(cluster)
    return found


def counted(
    tests: Iterable[Conversation], of_domain: Mapping[str, int], draw: Callable[[str], bytes]
) -> dict[int, float]:
    """Return which of the rows that a window tests with are scored, by seq, and how many requests each stands for.

    A cluster stands for as many of a domain's requests as it has here, so that what is told is the gain of what is
    asked; but for no more than `stands_for` says. Near copies are all scored. Of a group up to `MOST_OF_GROUP` rows of
    a domain are, which a keyed hash draws: they share its requests between them, and tell it more exactly than one.
    """
    of_cluster: dict[tuple[str, str], list[Conversation]] = defaultdict(list)
    for row in tests:
        of_cluster[row.domain, row.cluster].append(row)
    found: dict[int, float] = {}
    for (domain, _), members in of_cluster.items():
        joined = len({row.alike for row in members}) > 1
        seqs = sorted((row.seq for row in members), key=lambda seq: draw(f"counted {seq}"))
        kept = seqs[:MOST_OF_GROUP] if joined else seqs
        found.update(dict.fromkeys(kept, stands_for(len(members), of_domain[domain]) / len(kept)))
    return found


def stands_for(num_rows: int, of_domain: int) -> float:
    """Return how many requests a cluster of `num_rows` of a domain's rows stands for: at most 5% of the domain's.

    One group, or one text that is sent again and again, thus never says what the gain is; see `infra.regression_sets`.
    """
    return min(num_rows, max(MIN_CLUSTER, MAX_CLUSTER_SHARE * of_domain))
