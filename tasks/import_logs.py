"""Put requests that were served elsewhere into the query log, under the rules that hold for those that are served here.

Who imports a file says with that that its owners agreed to training: the rows get consent "full". Texts are scrubbed
before they are written, and a row's id is the hash of its subjects and content, so that importing twice adds nothing.
A row holds `prompt_ids` and `completion_ids`, tokens of the target, which count if there is something else as well; or
what `models.conversations` reads: chats, exchanges of OpenAI's API, prompts with or without answers.

A chat goes through the target's chat template as one with the service does, and the answer gets the token that ends it:
so an exchange has the ids that it had when it was served, or it is skipped and counted. A prompt without an answer is
skipped, too, or the target answers it. Optional: `domain`; `temperature`, 1 where nothing is said, as in OpenAI's API;
`subject`, a name, or the hash that a query log has for it; `safety_identifier` and `user`, names as a request has them;
`group`, what the request belongs with, as header `X-Redraft-Group` names it, or the hash.
"""

import asyncio
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

from infra import scrub
from infra.consent import ELSEWHERE, QueryRow, group_of, parse_domain, subject_of, subjects_named
from infra.home import home_secret
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.settings import load_settings
from models.chats import ChatEncoder
from models.conversations import NO_ANSWER, Answer, Conversation, given, paired, read_conversation, structure
from models.engines import Engine, Sampling
from models.recipe import Recipe
from models.rowfiles import FAULTS, WRONG, Row, Skipped, Unusable, count_rows, read_rows
from models.targets import describe, stop_ids
from models.types import Frozen
from tasks.generate_answers import open_engine
from tasks.stages import json_sha256, progress, task

BATCH_ROWS = 256
DEFAULT_TEMPERATURE = 1.0
IMPORTED = "import"  # no key's hash: no client can name a group of imported rows
HASHED = re.compile(r"[0-9a-f]{64}")
FINISH = re.compile(r"[a-z_]{1,32}")


class ImportReport(Frozen):
    """What became of the rows; the two halves of a Batch API's exchange are one.

    Attributes:
        num_repeated: rows whose content was in the log already.
        skipped, first: reason to number, and to place and fault of its first row.
    """

    num_read: int
    num_added: int
    num_repeated: int
    skipped: dict[str, int]
    first: dict[str, str]

    @property
    def lacks_answers(self) -> bool:
        """Whether some were skipped for want of an answer."""
        return NO_ANSWER in self.skipped

    def line(self) -> str:
        """Return the report in one line."""
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self.skipped.items()))
        skipped = f"{sum(self.skipped.values())}" + (f": {reasons}" if reasons else "")
        return f"read {self.num_read}, added {self.num_added}, repeated {self.num_repeated}, skipped {skipped}"


class _Scrubbed(NamedTuple):
    ids: list[int]
    text: str


class _Exchange(NamedTuple):
    """What a row holds, as tokens of the target; without a `completion` the target is to answer."""

    prompt: _Scrubbed
    completion: _Scrubbed | None
    finish_reason: str
    temperature: float
    subjects: list[str]
    group: str | None
    domain: str


class _Reader:
    def __init__(self, domain: str, max_len: int, strict: bool, answers: bool) -> None:
        self.num_read, self.skipped = 0, Skipped()
        self._domain, self._max_len, self._strict, self._answers = domain, max_len, strict, answers
        self._secret = home_secret(load_settings().home)
        registry = open_registry()
        target = registry.champion("target")
        if target is None:
            wanted = "the registry has no champion target yet, whose tokenizer the rows need"
            raise ValueError(f"{wanted}; run: redraft build --recipe FILE")
        self.target_dir = registry.download(target, load_settings().cache)
        self._target_version, self._vocab_size = target.number, describe(self.target_dir).vocab_size
        self._tokenizer, self._stops = AutoTokenizer.from_pretrained(self.target_dir), stop_ids(self.target_dir)
        self._has_template = self._tokenizer.chat_template is not None
        self._encoder = ChatEncoder.of(self._tokenizer)
        self._end = template_end(self._encoder, self._stops) if self._has_template else None

    def exchanges(self, files: Sequence[Path]) -> Iterator[_Exchange]:
        """Yield what can be logged; ValueError if a file can't be read or, in a strict import, a row can't be used."""
        for where, values in paired(self._rows(files), self._leave_out):
            try:
                exchange = self._exchange(given(values))
            except FAULTS as fault:
                self._leave_out(where, fault)
            else:
                self.num_read += 1
                yield exchange

    def scrubbed(self, token_ids: Sequence[int]) -> _Scrubbed:
        """Return tokens as they may be written."""
        return _Scrubbed(*self._encoder.rewrite(token_ids, scrub.scrub))

    def row(self, exchange: _Exchange, completion: _Scrubbed, finish_reason: str) -> QueryRow:
        """Return an exchange as a row of the log."""
        return QueryRow(
            id=self.name(exchange),
            time_ms=int(time.time() * 1000),
            subject=next(iter(exchange.subjects), None),
            aliases=exchange.subjects[1:] or None,
            group=exchange.group,
            domain=exchange.domain,
            consent="full",
            scrubber_revision=scrub.REVISION,
            target_version=self._target_version,
            draft_version=None,
            prompt=exchange.prompt.text,
            completion=completion.text,
            prompt_ids=exchange.prompt.ids,
            completion_ids=completion.ids,
            sampling={"temperature": exchange.temperature},
            finish_reason=finish_reason,
            speculating=False,
        )

    def name(self, exchange: _Exchange) -> str:
        """Return the id of an exchange's row, by its subjects and its content: two people's rows are two.

        Of one that the target is to answer it is by what is asked.
        """
        said = exchange.temperature if exchange.completion is None else exchange.completion.ids
        return f"{ELSEWHERE}{json_sha256([self._target_version, exchange.subjects, exchange.prompt.ids, said])[:32]}"

    def _rows(self, files: Sequence[Path]) -> Iterator[tuple[str, Row]]:
        for file in files:

            def unreadable(place: str, fault: str, file: Path = file) -> None:
                self._leave_out(f"{file}, {place}", Unusable("unreadable", fault))

            for place, row in read_rows(file, unreadable):
                yield f"{file}, {place}", row

    def _leave_out(self, where: str, fault: Exception) -> None:
        self.num_read += 1
        self.skipped.add(where, fault)
        if self._strict:
            raise ValueError(*self.skipped.first.values()) from fault

    def _exchange(self, values: Mapping[str, Any]) -> _Exchange:
        temperature, names = values.get("temperature"), values
        completion_ids: list[int] | None
        if {"prompt_ids", "completion_ids"} <= values.keys():
            prompt_ids, completion_ids = (self._ids(name, values[name]) for name in ("prompt_ids", "completion_ids"))
            finish = str(values.get("finish_reason") or ("stop" if completion_ids[-1] in self._stops else "length"))
            if not FINISH.fullmatch(finish):
                raise Unusable(WRONG, f"finish_reason is {finish!r}, wanted a word such as stop or length")
        else:
            said = read_conversation(values)
            temperature, names = said.temperature, said.names
            prompt_ids = self._prompt(said)
            completion_ids = self._completion(said, prompt_ids)
            finish = "length" if said.answer is not None and said.answer.finish_reason == "length" else "stop"
        prompt = self.scrubbed(prompt_ids)
        completion = None if completion_ids is None else self.scrubbed(completion_ids)
        if (length := len(prompt.ids) + (1 if completion is None else len(completion.ids))) > self._max_len:
            raise Unusable("too long", f"wanted at most {self._max_len} tokens, the engine's context; got {length}")
        return _Exchange(
            prompt,
            completion,
            finish,
            _temperature(temperature),
            _subjects(names),
            self._group(values.get("group")),
            self._domain or _domain(values.get("domain")),
        )

    def _prompt(self, said: Conversation) -> list[int]:
        if not self._has_template:
            raise Unusable("without token ids", "the target has no chat template, so token ids were wanted")
        try:
            prompt_ids = self._encoder.encode(
                [message.as_openai() for message in said.messages],
                said.tools or None,
                add_generation_prompt=not said.continues,
                continue_final_message=said.continues,
                template_arguments=said.template_arguments,
            )
        except ValueError as error:
            raise Unusable("that the chat template refuses", str(error)) from error
        counted = said.num_tokens[0] if said.num_tokens is not None else len(prompt_ids)
        if counted != len(prompt_ids) or said.prompt_ids not in (None, prompt_ids):
            raise Unusable("rendered otherwise than served", f"the prompt has {len(prompt_ids)} tokens here")
        return prompt_ids

    def _completion(self, said: Conversation, prompt_ids: list[int]) -> list[int] | None:
        """Return the answer's tokens; None where the target is to answer."""
        answer = said.answer
        told = answer is not None and answer.token_ids is not None and said.prompt_ids == prompt_ids
        if answer is None or (answer.unknown and not told):
            if self._answers:
                return None
            if answer is None:
                raise Unusable(NO_ANSWER, "wanted a question, and last the assistant's answer")
            fault = "the answer's text doesn't tell its tokens; with token_ids it would be taken"
            raise Unusable(answer.unknown, fault)
        if told:
            ids = self._ids("token_ids", answer.token_ids)
        else:
            ids = self._encoder.encode_answer("\n".join(answer.message.texts)) + self._ending(answer)
        if said.num_tokens is not None and said.num_tokens[1] != len(ids):
            fault = f"the service counted {said.num_tokens[1]} tokens, the answer has {len(ids)}"
            raise Unusable("with an answer of other tokens", fault)
        return ids

    def _ending(self, answer: Answer) -> list[int]:
        if answer.end is None or not self._stops:
            return []
        ends = {"template": self._end, "eos": self._tokenizer.eos_token_id}
        end = ends[answer.end] if isinstance(answer.end, str) else answer.end
        if end is None:
            raise Unusable("with an unknown end", "the chat template writes no token that ends an answer")
        return self._ids("stop_reason", [end])

    def _ids(self, name: str, value: object) -> list[int]:
        ids = structure(value)
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            raise Unusable(WRONG, f"{name}: wanted a list of whole numbers, at least one")
        for place, token in enumerate(ids):
            if not 0 <= token < self._vocab_size:
                raise Unusable("with unknown tokens", f"{name}[{place}] is {token}, wanted 0 to {self._vocab_size - 1}")
        return ids

    def _group(self, value: object) -> str | None:
        if isinstance(value, str) and HASHED.fullmatch(value):
            return value
        try:
            return group_of(self._secret, IMPORTED, value)
        except ValueError as error:
            raise Unusable("with an invalid group", str(error)) from error


def template_end(encoder: ChatEncoder, stops: frozenset[int]) -> int | None:
    """Return the token that a chat template writes after an answer, of those that end one.

    Of a template that writes none, or refuses a chat of two turns, the only one that there is; None if there are more.
    """
    only = next(iter(stops)) if len(stops) == 1 else None
    asked = {"role": "user", "content": "x"}
    try:
        one, other = (
            encoder.encode([asked, {"role": "assistant", "content": text}], add_generation_prompt=False)
            for text in "ab"
        )
    except ValueError:
        return only
    start = next((place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), 0)
    return next((token for token in one[start:] if token in stops), only)


@task
def import_logs(
    files: Sequence[Path], max_len: int, domain: str = "", strict: bool = False, answering: Recipe | None = None
) -> ImportReport:
    """Add rows of files to the query log.

    Args:
        files: of rows, see `models.rowfiles`.
        max_len: tokens of prompt and answer that the engine takes.
        domain: of all rows; "" reads each row's own.
        strict: refuse all of it for one row that can't be used, before any is added.
        answering: whose engine lets the target answer prompts without an answer, or with one whose tokens aren't known.

    Raises:
        ValueError: a file or the domain is wrong, nothing was built yet or, if `strict`, a row can't be used.
    """
    if domain:
        _domain(domain)
    total, reader = sum(count_rows(file) for file in files), _Reader(domain, max_len, strict, answering is not None)
    if strict:
        for _ in reader.exchanges(files):
            pass
        reader.num_read = 0
    with progress("import") as show:
        added = asyncio.run(_add(reader, files, max_len, answering, lambda: show(reader.num_read, total)))
    if answering is not None:
        gc.collect()  # an engine is in reference cycles, and complains if it is still there when Python ends
    skipped, first = dict(reader.skipped.counts), reader.skipped.first
    repeated = reader.num_read - sum(skipped.values()) - added
    return ImportReport(num_read=reader.num_read, num_added=added, num_repeated=repeated, skipped=skipped, first=first)


async def _add(
    reader: _Reader, files: Sequence[Path], max_len: int, answering: Recipe | None, show: Callable[[], None]
) -> int:
    """Write what was read, and return how many rows were new; the engine starts with the first prompt that needs it."""
    log, num_added, engine = QueryLog(load_settings().querylog), 0, None
    logged = set(log.ids()) if answering is not None else set()
    exchanges = reader.exchanges(files)
    async with AsyncExitStack() as stack:
        while batch := list(itertools.islice(exchanges, BATCH_ROWS)):
            rows = [reader.row(one, one.completion, one.finish_reason) for one in batch if one.completion is not None]
            waiting = {reader.name(one): one for one in batch if one.completion is None}
            asked = {name: one for name, one in waiting.items() if name not in logged}
            if asked and answering is not None:
                if engine is None:
                    started = open_engine(reader.target_dir, answering.engine, load_settings().costs)
                    engine = await stack.enter_async_context(started)
                rows += await _answered(engine, reader, asked, max_len, answering)
            num_added += log.append(rows)
            logged |= asked.keys()
            show()
    return num_added


async def _answered(
    engine: Engine, reader: _Reader, asked: Mapping[str, _Exchange], max_len: int, recipe: Recipe
) -> list[QueryRow]:
    slots = asyncio.Semaphore(recipe.generate.concurrency)

    async def answer(name: str, one: _Exchange) -> QueryRow:
        most = min(recipe.generate.max_tokens, max_len - len(one.prompt.ids))
        async with slots:
            sampling = Sampling(max_tokens=most, temperature=one.temperature)
            completion = await engine.generate(one.prompt.ids, sampling, name)
        return reader.row(one, reader.scrubbed(completion.token_ids), completion.finish_reason or "abort")

    return list(await asyncio.gather(*(answer(name, one) for name, one in asked.items())))


def _domain(value: object) -> str:
    try:
        return parse_domain(value)
    except ValueError as error:
        raise Unusable("with an invalid domain", str(error)) from error


def _temperature(value: object) -> float:
    if value is None:
        return DEFAULT_TEMPERATURE
    try:
        temperature = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # raises what is caught
    except (TypeError, ValueError):
        temperature = math.nan
    if not (math.isfinite(temperature) and temperature >= 0):
        raise Unusable("with an invalid temperature", f"temperature is {value!r}, wanted a number from 0 on")
    return temperature


def _subjects(values: Mapping[str, Any]) -> list[str]:
    value = values.get("subject")
    if value is not None and not isinstance(value, str):
        raise Unusable("with an invalid subject", f"subject is a {type(value).__name__}, wanted a text")
    own = value if value and HASHED.fullmatch(value) else subject_of(None, value or None)
    try:
        named = subjects_named(None, values)
    except ValueError as error:
        raise Unusable("with an invalid subject", str(error)) from error
    known = [one for one in values.get("aliases") or () if isinstance(one, str) and HASHED.fullmatch(one)]  # exported
    return list(dict.fromkeys(one for one in (own, *named, *known) if one is not None))
