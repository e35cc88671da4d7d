"""Questions of a file whose reference holds a working and then an answer: one of the two, as a chat to train on.

As in "distilling step-by-step" (arXiv:2305.02301) one file makes two tasks, one of answers and one of rationales, told
apart by what stands before the question. A recipe names them as two domains of its text, with the same numbers: then a
question is on the same side of both. GSM8K's "working … #### answer" is read as it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from models.conversations import prompt_from_row
from models.params import BaseParams, LocalPath, unread
from models.rowfiles import WRONG, Unusable, read_rows, usable
from models.sources import Document, Message, Prompt, unique


class Params(BaseParams):
    """Which file, and which of the two tasks.

    Attributes:
        path: JSON Lines, JSON, CSV or Parquet, also in .gz or .zst.
        task: what the assistant says: "answer" what stands behind the separator, "rationale" what stands before it.
        column: holds the question: a text, or a chat whose last message is the user's.
        reference_column: holds working, separator and answer.
        separator: its last occurrence counts.
        instruction: stands before the question of a rationale.
        domain: of all items; a recipe's table names it, and elsewhere "" reads each row's column `domain`.
    """

    name: Literal["reasoned"] = "reasoned"
    path: LocalPath = Field(min_length=1)
    task: Literal["answer", "rationale"]
    column: str = "messages"
    reference_column: str = "reference"
    separator: str = Field("####", min_length=1)
    instruction: str = "Explain step by step: "
    domain: str = ""
    _instructed = unread("instruction", when=lambda params: params.task == "answer", why='task is "answer"')


def prompts(params: Params) -> list[Prompt]:
    """Return the questions of the task in the file's order, without exact copies; ValueError if there is no such file,
    or no row can be used; names the first of each reason."""
    return unique(prompt for prompt, _ in _read(params))


def documents(params: Params) -> list[Document]:
    """Return each question with what the task says to it; see `prompts`."""
    return unique(
        Document(
            content=(*prompt.messages, Message(role="assistant", content=said)),
            domain=prompt.domain,
            group=prompt.group,
        )
        for prompt, said in _read(params)
    )


def _read(params: Params) -> Iterator[tuple[Prompt, str]]:
    def make(place: str, row: dict[str, Any]) -> tuple[Prompt, str]:
        prompt = prompt_from_row(row, params.column, params.domain, f"{Path(params.path).name}:{place}")
        *before, last = prompt.messages
        if not isinstance(last.content, str):
            raise Unusable(WRONG, f'column "{params.column}": wanted one text as the last message')
        if params.task == "rationale":
            asked = last.model_copy(update={"content": params.instruction + last.content})
            prompt = prompt.model_copy(update={"messages": (*before, asked)})
        return prompt, _said(row, params)

    return usable(params.path, lambda on_fault: read_rows(Path(params.path), on_fault), make)


def _said(row: dict[str, Any], params: Params) -> str:
    reference = row.get(params.reference_column)
    if not isinstance(reference, str):
        raise Unusable(WRONG, f'column "{params.reference_column}" is {reference!r}, wanted a text')
    rationale, _, answer = reference.rpartition(params.separator)
    if not rationale.strip() or not answer.strip():
        raise Unusable(
            WRONG, f'column "{params.reference_column}" has no working and answer around {params.separator!r}'
        )
    return (rationale if params.task == "rationale" else answer).strip()
