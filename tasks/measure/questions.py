"""Questions in Spec-Bench's fields: id, domain (the task) and messages, of which each user's waits for an answer."""

import hashlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from models.params import validate
from models.rowfiles import read_rows
from models.sources import Message, Prompt


class Question(BaseModel):
    """One row; what else it has is not read. A user's message that no assistant's follows is a turn."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = Field(min_length=1)
    domain: str = Field(min_length=1)
    messages: tuple[Message, ...] = Field(min_length=1)

    @property
    def turns(self) -> list[int]:
        """How many messages come before each answer that it waits for."""
        roles = [*(message.role for message in self.messages), ""]
        steps = enumerate(pairwise(roles), start=1)
        return [place for place, (role, after) in steps if role == "user" and after != "assistant"]


def read_questions(file: Path, per_task: int) -> dict[str, list[Question]]:
    """Return task to its first questions, in the file's order, all for 0.

    ValueError names the row that can't be read, whose id occurs twice, or in which nobody waits for an answer.
    """
    tasks: dict[str, list[Question]] = {}
    seen: set[str] = set()
    for place, row in read_rows(file):
        question = validate(Question, row, f"{file}, {place}")
        if question.id in seen:
            raise ValueError(f"{file}, {place}: id {question.id} occurs twice")
        if not question.turns:
            raise ValueError(f"{file}, {place}: no message of the user waits for an answer")
        seen.add(question.id)
        of_task = tasks.setdefault(question.domain, [])
        if not per_task or len(of_task) < per_task:
            of_task.append(question)
    if not tasks:
        raise ValueError(f"{file} has no rows")
    return tasks


def as_questions(prompts: Iterable[Prompt]) -> dict[str, list[Question]]:
    """Return domain to its prompts as questions of one turn; ValueError if one has tools or template arguments."""
    tasks: dict[str, list[Question]] = {}
    for prompt in prompts:
        if prompt.fields():
            raise ValueError(f"a prompt of {prompt.domain} has {', '.join(prompt.fields())}, which no question has")
        question = Question(id=prompt.id, domain=prompt.domain, messages=prompt.messages)
        tasks.setdefault(prompt.domain, []).append(question)
    return tasks


def fingerprint(tasks: dict[str, list[Question]]) -> str:
    """Return the sha256 of what is asked."""
    asked = "".join(question.model_dump_json() for of_task in tasks.values() for question in of_task)
    return hashlib.sha256(asked.encode()).hexdigest()


def chat_before(question: Question, place: int, answers: dict[int, str]) -> list[dict[str, Any]]:
    """Return the messages that the answer at a place follows, see `Question.turns`, with the answers before."""
    chat: list[dict[str, Any]] = []
    for number, message in enumerate(question.messages[:place], start=1):
        chat.append(message.as_openai())
        if number in answers:
            chat.append({"role": "assistant", "content": answers[number]})
    return chat
