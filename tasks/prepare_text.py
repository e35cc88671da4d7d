"""The documents that targets are trained, calibrated and measured on, as texts until a target's tokenizer is known.

A directory of kind "text" holds `train.jsonl` and `held_out.jsonl`, one document a line.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from transformers import AutoTokenizer

from infra.artifacts import Artifact
from models import catalog
from models.chats import ChatEncoder
from models.sources import Document, draw_parts, encoded, named
from models.stages import Text
from tasks.stages import cached_step, content_of, task
from tasks.stages.samples import SPLITS, TrafficSplit

T = TypeVar("T")


@task
def prepare_text(text: Mapping[str, Text], seed: int) -> Artifact:
    """Write each part's documents of all domains; an artifact of kind "text"."""

    def make(directory: Path, _: Path) -> None:
        chosen = [choose_documents(domain, table, seed) for domain, table in text.items()]
        for part in SPLITS:
            write_documents(directory, part, [document for parts in chosen for document in parts[part]])

    params = {"seed": seed, "text": {domain: content_of(table) for domain, table in text.items()}}
    return cached_step("text", "text", params, make)


def choose_documents(domain: str, text: Text, seed: int) -> dict[TrafficSplit, list[Document]]:
    """Return part to documents, under the recipe's name of the domain; ValueError if the source has too few.

    Parts share no group.
    """
    documents = catalog.load("sources", text.source.name).documents(named(text.source, domain))
    return draw_parts(documents, text.sizes(), domain, seed)


def write_documents(directory: Path, part: TrafficSplit, documents: Iterable[Document]) -> None:
    """Write one part of a "text" directory."""
    lines = "".join(document.model_dump_json() + "\n" for document in documents)
    (directory / f"{part}.jsonl").write_text(lines, encoding="utf-8")


def read_documents(directory: Path, part: TrafficSplit) -> list[Document]:
    """Read one part of a "text" directory."""
    lines = (directory / f"{part}.jsonl").read_text(encoding="utf-8").splitlines()
    return [Document.model_validate_json(line) for line in lines]


def tokenise(documents: Sequence[Document], target_dir: Path) -> dict[str, list[list[int]]]:
    """Return domain to the token ids of its documents, as a target's tokenizer and chat template write them."""
    encoder = ChatEncoder.of(AutoTokenizer.from_pretrained(target_dir))
    found: dict[str, list[list[int]]] = {}
    for document, ids in encoded(documents, encoder):
        found.setdefault(document.domain, []).append(ids)
    return found


def in_turn(domains: Mapping[str, Sequence[T]]) -> list[T]:
    """Return the first of each domain, then the second of each, and so on."""
    turns = itertools.chain.from_iterable(itertools.zip_longest(*domains.values()))
    return [one for one in turns if one is not None]


def first_of_each(documents: Mapping[str, Sequence[list[int]]], count: int, max_length: int) -> list[list[int]]:
    """Return `count` documents, the domains in turn, each cut to `max_length` tokens; ValueError if there are fewer."""
    found = [document[:max_length] for document in in_turn(documents)][:count]
    if len(found) < count:
        raise ValueError(f"num_documents is {count}, the text has {len(found)}")
    return found
