"""What passes a reader of streams: the same bytes in whatever pieces, read at little cost."""

import sys
from typing import Any

import pytest

from services.frames import Added, StreamReader
from tests.services.played import CHAT, STREAM, STREAMS, Step, cut_into, frames

MOST_CALLS = 16  # of functions, for a chunk


def added(body: dict[str, Any]) -> tuple[Added, dict[str, Any]]:
    """Return what is asked for beyond a request, and the request that does."""
    options = body.get("stream_options") or {}
    usage = {"stream_options": {"include_usage": True}} if not options.get("include_usage") else {}
    more = {"return_token_ids": True, **usage}
    return Added(ids=body.get("return_token_ids") is not True, usage=bool(usage)), body | more


@pytest.mark.parametrize("piece", [0, 1, 90, 1460, 1 << 20])
@pytest.mark.parametrize("law", STREAMS)
def test_a_stream_passes_as_it_is_in_whatever_pieces_it_comes(law: str, piece: int) -> None:
    body, steps, told, _ = STREAMS[law]
    told = {name: value for name, value in told.items() if name != "piece"}
    asked, more = added(body)
    sent, reader = frames(more, steps, **told), StreamReader(asked)
    parts = cut_into(b"".join(sent), piece) if piece else sent
    assert b"".join(map(reader.feed, parts)) + reader.rest() == b"".join(frames(body, steps, **told))
    completion = reader.completion("1", False)
    assert completion.token_ids == tuple(one for step in steps for one in step.ids)
    assert reader.fault == "" and completion.accepted == (2, 0)


@pytest.mark.parametrize(
    "frame",
    [
        b'data: {"choices":[{"delta":{"content":"\\"token_ids\\":[7]"},"finish_reason":null}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"a"},"token_ids":[7,"finish_reason":null}\n\n',
        b'data: {"token_ids":[[7],[8]],"finish_reason":null}\n\n',
        b'event: a\ndata: {"token_ids":[7],"finish_reason":null}\n\n',
        b": ping\n\n",
    ],
    ids=["ids in a text", "no end", "other ids", "an event", "a comment"],
)
def test_what_only_looks_like_a_usual_chunk_passes_as_it_came(frame: bytes) -> None:
    reader = StreamReader(Added(True, True))
    assert reader.feed(frame) + reader.rest() == frame
    assert not reader.has_ids


def test_frames_of_another_end_of_lines_are_told_apart() -> None:
    reader, sent = StreamReader(Added(True, True)), b': ping\r\n\r\ndata: {"error":{}}\n\n'
    assert (reader.feed(sent), reader.fault) == (sent, "an error")


def test_ids_that_are_none_are_a_fault_and_no_row() -> None:
    reader = StreamReader(Added(True, True))
    reader.feed(b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null,"token_ids":[7,"b"]}]}\n\n')
    with pytest.raises(ValueError, match="int"):
        reader.completion("1", False)


def test_a_usual_chunk_costs_few_calls() -> None:
    """Counted are Python's and C's functions: a chunk that comes alone finds none of them in the processor's caches."""
    asked, more = added(CHAT | STREAM)
    first, *rest = frames(more, [Step([80 + at], {"content": "word "}) for at in range(9)])
    reader, calls = StreamReader(asked), 0
    reader.feed(first)

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        reader.feed(rest[0])
    finally:
        sys.setprofile(before)
    assert calls <= MOST_CALLS
