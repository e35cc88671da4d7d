"""Put requests that were served elsewhere into the query log, under the rules that hold for those that are served here.

Who imports a file says with that that its owners agreed to training: the rows get consent "full". Texts are scrubbed
before they are written, and a row's id is the hash of its content, so that importing twice adds nothing. A row may hold

- `prompt_ids` and `completion_ids`: tokens of the target; they count if there are texts as well;
- `messages`: a chat in OpenAI's shape that ends with the answer;
- `prompt` and `completion`: one question and its answer.

Texts go through the target's chat template, as a chat with the service does, and the answer gets the token that ends
it. Optional: `domain`; `temperature`, 1 where nothing is said, as in OpenAI's API; `subject`, a name, or the hash that
a query log has for it; `safety_identifier` and `user`, names as a request has them; `group`, what the request
belongs with, as header `X-Redraft-Group` names it, or the hash.
"""

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from infra import scrub
from infra.consent import ELSEWHERE, QueryRow, group_of, parse_domain, subject_of, subjects_named
from infra.manifest import canonical_json
from infra.querylog import QueryLog
from infra.registry import open_registry
from infra.secret import home_secret
from infra.settings import load_settings
from models.chats import ChatEncoder
from models.params import Frozen
from models.rowfiles import count_rows, read_rows
from models.sources import parse_chat
from models.targets import describe
from tasks.stages.reporting import progress
from tasks.stages.task import task

BATCH_ROWS = 256
NUM_EXAMPLES = 5
MAX_FAULT_CHARS = 300
DEFAULT_TEMPERATURE = 1.0
IMPORTED = "import"  # no key's hash: no client can name a group of imported rows
HASHED = re.compile(r"[0-9a-f]{64}")


class Unusable(ValueError):
    """A row that can't be logged; `reason` is what it is counted under, the message says what was wanted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ImportReport(Frozen):
    """What became of the rows.

    Attributes:
        num_repeated: rows whose content was in the log already.
        skipped: reason to number.
        examples: place and fault of the first skipped rows.
    """

    num_read: int
    num_added: int
    num_repeated: int
    skipped: dict[str, int]
    examples: tuple[str, ...]

    def line(self) -> str:
        """Return the report in one line."""
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(self.skipped.items()))
        skipped = f"{sum(self.skipped.values())}" + (f": {reasons}" if reasons else "")
        return f"read {self.num_read}, added {self.num_added}, repeated {self.num_repeated}, skipped {skipped}"


class _Reader:
    """Turns rows of files into rows of the log, for the target that is served.

    Attributes:
        skipped: reason to number of the rows that were left out so far.
        examples: the first of them.
    """

    def __init__(self, domain: str, max_len: int, strict: bool) -> None:
        self.num_read = 0
        self.skipped: Counter[str] = Counter()
        self.examples: list[str] = []
        self._domain, self._max_len, self._strict = domain, max_len, strict
        self._secret = home_secret(load_settings().home)
        registry = open_registry()
        target = registry.champion("target")
        if target is None:
            raise ValueError(
                "the registry has no champion target yet, whose tokenizer the rows need; run: redraft build"
            )
        directory = registry.download(target, load_settings().cache)
        self._target_version, self._vocab_size = target.number, describe(directory).vocab_size
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._encoder = ChatEncoder.of(self._tokenizer)

    def rows(self, files: Sequence[Path]) -> Iterator[QueryRow]:
        """Yield what can be logged.

        Raises:
            ValueError: a file can't be read or, in a strict import, a row can't be used.
        """
        for file in files:

            def skip(place: str, fault: str, reason: str = "unreadable", file: Path = file) -> None:
                self.num_read += reason == "unreadable"
                if self._strict:
                    raise ValueError(f"{file}, {place}: {fault}")
                self.skipped[reason] += 1
                if len(self.examples) < NUM_EXAMPLES:
                    self.examples.append(f"{file}, {place}: {fault[:MAX_FAULT_CHARS]}")

            for place, values in read_rows(file, skip):
                self.num_read += 1
                try:
                    row = self._row(values)
                except Unusable as error:
                    skip(place, str(error), error.reason)
                except (ValueError, TypeError, OverflowError, RecursionError) as error:  # of what no check above names
                    skip(place, f"{type(error).__name__}: {error}", "with wrong fields")
                else:
                    yield row

    def _row(self, values: Mapping[str, Any]) -> QueryRow:
        prompt_ids, completion_ids = self._token_ids(values)
        prompt_ids, prompt = self._encoder.rewrite(prompt_ids, scrub.scrub)
        completion_ids, completion = self._encoder.rewrite(completion_ids, scrub.scrub)
        if (length := len(prompt_ids) + len(completion_ids)) > self._max_len:
            raise Unusable("too long", f"wanted at most {self._max_len} tokens, the engine's context; got {length}")
        content = canonical_json([self._target_version, prompt_ids, completion_ids])
        subjects = _subjects(values)
        return QueryRow(
            id=f"{ELSEWHERE}{hashlib.sha256(content).hexdigest()[:32]}",
            time_ms=int(time.time() * 1000),
            subject=next(iter(subjects), None),
            aliases=subjects[1:] or None,
            group=self._group(values.get("group")),
            domain=self._domain or _domain(values.get("domain")),
            consent="full",
            scrubber_revision=scrub.REVISION,
            target_version=self._target_version,
            draft_version=None,
            prompt=prompt,
            completion=completion,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            sampling={"temperature": _temperature(values.get("temperature"))},
            finish_reason="stop" if completion_ids[-1] == self._tokenizer.eos_token_id else "length",
            speculating=False,
        )

    def _group(self, value: object) -> str | None:
        if isinstance(value, str) and HASHED.fullmatch(value):
            return value
        try:
            return group_of(self._secret, IMPORTED, None if value == "" else value)
        except ValueError as error:
            raise Unusable("with an invalid group", str(error)) from error

    def _token_ids(self, values: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        given = {name for name, value in values.items() if value is not None}
        if {"prompt_ids", "completion_ids"} <= given:
            return self._checked("prompt_ids", values), self._checked("completion_ids", values)
        if "messages" in given:
            return self._encoded(values["messages"], "messages")
        if {"prompt", "completion"} <= given:
            turns = (("user", values["prompt"]), ("assistant", values["completion"]))
            return self._encoded([{"role": role, "content": text} for role, text in turns], "prompt and completion")
        raise Unusable(
            "with wrong fields",
            f"wanted prompt_ids and completion_ids, messages, or prompt and completion; "
            f"got {', '.join(sorted(given)) or 'nothing'}",
        )

    def _checked(self, name: str, values: Mapping[str, Any]) -> list[int]:
        ids = values[name]
        if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
            raise Unusable("with wrong fields", f"{name}: wanted a list of whole numbers, at least one")
        for place, token in enumerate(ids):
            if not 0 <= token < self._vocab_size:
                raise Unusable("with unknown tokens", f"{name}[{place}] is {token}, wanted 0 to {self._vocab_size - 1}")
        return ids

    def _encoded(self, value: object, name: str) -> tuple[list[int], list[int]]:
        if not isinstance(value, list):
            raise Unusable("with wrong fields", f"{name}: wanted a list of messages, got {type(value).__name__}")
        if self._tokenizer.chat_template is None:
            raise Unusable("without token ids", f"{name}: the target has no chat template, so token ids were wanted")
        try:
            messages = parse_chat(value, name)
            if len(messages) < 2 or messages[-1].role != "assistant":
                raise Unusable("without an answer", f"{name}: wanted a question, and last the assistant's answer")
            prompt_ids = self._encoder.encode([message.model_dump() for message in messages[:-1]])
        except Unusable:
            raise
        except ValueError as error:
            raise Unusable("with wrong fields", str(error)) from error
        answer = self._encoder.encode_answer(messages[-1].content)
        end = self._tokenizer.eos_token_id
        return prompt_ids, answer if end is None else [*answer, end]


@task
def import_logs(files: Sequence[Path], max_len: int, domain: str = "", strict: bool = False) -> ImportReport:
    """Add rows of files to the query log.

    Args:
        files: JSON Lines, Parquet or CSV.
        max_len: tokens of prompt and answer that the engine takes.
        domain: of all rows; "" reads each row's own.
        strict: refuse all of it for one row that can't be used, before any is added.

    Raises:
        ValueError: a file can't be read, nothing was built yet, the domain is no domain or, if `strict`, a row can't be
        used.
    """
    if domain:
        _domain(domain)
    total = sum(count_rows(file) for file in files)
    if strict:
        for _ in _Reader(domain, max_len, strict).rows(files):
            pass
    reader, log = _Reader(domain, max_len, strict), QueryLog(load_settings().querylog)
    num_added, num_written, batch = 0, 0, []
    with progress("import") as show:
        for row in reader.rows(files):
            batch.append(row)
            if len(batch) == BATCH_ROWS:
                num_added, num_written, batch = num_added + log.append(batch), num_written + len(batch), []
                show(reader.num_read, total)
        num_added, num_written = num_added + log.append(batch), num_written + len(batch)
        show(reader.num_read, total)
    return ImportReport(
        num_read=reader.num_read,
        num_added=num_added,
        num_repeated=num_written - num_added,
        skipped=dict(reader.skipped),
        examples=tuple(reader.examples),
    )


def _domain(value: object) -> str:
    try:
        return parse_domain(None if value == "" else value)
    except ValueError as error:
        raise Unusable("with an invalid domain", str(error)) from error


def _temperature(value: object) -> float:
    if value is None or value == "":
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
