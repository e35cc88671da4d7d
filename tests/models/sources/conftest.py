"""Default streams, made once a session: two of the sources take seconds."""

from collections.abc import Callable
from functools import cache

import pytest

from models import catalog
from models.sources import Document, Prompt


@pytest.fixture(scope="session")
def default_stream() -> Callable[[str], list[Prompt]]:
    """Look up the prompts of a source with its default settings."""

    @cache
    def make(name: str) -> list[Prompt]:
        source = catalog.load("sources", name)
        return source.prompts(source.Params())

    return make


@pytest.fixture(scope="session")
def default_documents() -> Callable[[str], list[Document]]:
    """Look up the documents of a source with its default settings."""

    @cache
    def make(name: str) -> list[Document]:
        source = catalog.load("sources", name)
        return source.documents(source.Params())

    return make
