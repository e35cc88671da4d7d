"""Documents of a recipe and their tokens; how they are drawn is tested with prompts."""

from pathlib import Path

import pytest

from models.sources import Document, Message
from tasks.prepare_text import first_of_each, tokenise


def test_texts_and_chats_become_tokens_of_their_domain(tiny_target: Path) -> None:
    chat = (Message(role="user", content="a"), Message(role="assistant", content="b"))
    documents = [Document(content=content, domain=domain, group="g") for content, domain in (("ab", "x"), (chat, "y"))]
    tokens = tokenise(documents, tiny_target)
    assert tokens.keys() == {"x", "y"}
    assert len(tokens["x"][0]) == 3  # two bytes and the end
    assert len(tokens["y"][0]) > 10


def test_documents_to_calibrate_on_come_from_the_domains_in_turn_and_are_cut() -> None:
    documents = {"a": [[1] * 9, [2] * 9, [3] * 9], "b": [[4] * 9]}
    assert first_of_each(documents, 3, 2) == [[1, 1], [4, 4], [2, 2]]
    with pytest.raises(ValueError, match="num_documents is 5, the text has 4"):
        first_of_each(documents, 5, 2)
