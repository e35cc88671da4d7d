"""Default streams and documents, made once a session: two of the sources take seconds."""

from collections.abc import Callable
from functools import cache

import pytest

from models import catalog
from models.sources import Document, Prompt


@cache
def _made(name: str, what: str) -> list[Prompt | Document]:
    source = catalog.load("sources", name)
    return getattr(source, what)(source.Params())


@pytest.fixture
def default_stream() -> Callable[[str], list[Prompt]]:
    """Look up the prompts of a source with its default settings."""
    return lambda name: _made(name, "prompts")


@pytest.fixture
def default_documents() -> Callable[[str], list[Document]]:
    """Look up the documents of a source with its default settings."""
    return lambda name: _made(name, "documents")
