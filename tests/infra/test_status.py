from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from infra.status import RunningService, of_domains, parse_status
from tests.infra.statuses import PROOF, STATUS

URL = "http://127.0.0.1:8000"


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A model of this module, and those that its fields hold."""
    yield model
    for field in model.model_fields.values():
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.__module__ == model.__module__:
                yield from models(kind)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"<html>", "no JSON"),
        (b"[]", "no JSON"),
        (STATUS.model_copy(update={"swaps": "many"}).model_dump_json(warnings=False).encode(), r"\(swaps\)"),
        (b'{"later": 1,' + STATUS.model_dump_json(exclude={"log"}).encode()[1:], r"\(later, log\)"),
    ],
    ids=["html", "list", "wrong", "another version"],
)
def test_what_is_no_status_is_refused_with_what_differs_and_what_to_do(content: bytes, names: str) -> None:
    with pytest.raises(ValueError, match=f"{names}.* restart it"):
        parse_status(content, URL)


@pytest.mark.parametrize(
    ("changed", "drafts", "proven"),
    [
        ({}, False, False),
        ({"draft_version": 4, "proof": PROOF}, True, True),
        ({"draft_version": 3, "proof": PROOF}, False, False),
        ({"draft_version": 4, "proof": PROOF, "speculating": False}, True, False),
        ({"draft_version": 4}, True, False),
    ],
)
def test_a_draft_is_proven_after_its_probation_while_it_drafts(changed, drafts, proven) -> None:
    status = STATUS.model_copy(update=changed)
    assert (status.drafts_with(4), status.has_proven(4)) == (drafts, proven)


def test_what_the_service_asks_itself_is_no_domain_without_a_name() -> None:
    speed = STATUS.speed["chat"]
    told = of_domains({"code": speed, "": speed, "/structured": speed, "chat/structured": speed})
    assert list(told) == ["chat/structured", "code"]


@pytest.mark.parametrize("model", dict.fromkeys(models(RunningService)), ids=lambda model: model.__name__)
def test_every_field_says_what_it_is(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{name}"
