"""The row of the query log, and what consent lets it hold.

Three parties have a say: the request's `X-Redraft-Log` header, OpenAI's `store` flag and the policy of the API key.
The strictest that speaks wins, something malformed means "none", and when nobody speaks only metadata is kept.
"""

import hmac
import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, JsonValue, field_validator, model_validator

from infra.artifacts import canonical_json
from models.types import Frozen

Consent = Literal["none", "metadata", "full"]
CONSENT_LEVELS: tuple[Consent, ...] = ("none", "metadata", "full")  # strictest first
DOMAIN = r"^[a-z0-9_-]{1,32}$"  # a recipe's tables are named by the same words
DEFAULT_DOMAIN = "default"  # of a request that names none
# What a row holds with full consent only: its text, and what says which texts belong together.
CONTENT_FIELDS = ("prompt", "completion", "prompt_ids", "completion_ids", "drafted_ids", "group")
NAMED_BY = ("safety_identifier", "user")  # OpenAI's fields that say whom a request is for
GROUP = r"^[\x21-\x7e]{1,128}$"  # as a client names one; only its hash is kept

OTHER_DOMAINS = "other"  # where there are too many to be told apart
ELSEWHERE = "import-"  # begins the id of a row that was served elsewhere and imported
UNDRAFTED = -1  # the match of a step for which nothing was to draft, which counts for nobody's acceptance
AGAIN = " again"  # behind a row's id, which has no space: another answer to its prompt
Domain = Annotated[str, Field(pattern=DOMAIN)]
Count = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class QueryRow(Frozen):
    """One served request, after scrubbing.

    `subject` and `key` are hashes, of who asked and of the API key that was asked with; one key may have many
    subjects. `aliases` are those of the other names that the request has for who asked. `group` is a hash too, of what
    the client says that the request belongs with. `server` is the host name and port of what answered, None if that is
    not known. `drafted` and `accepted` count tokens per verification step; `drafted_ids` holds the tokens of each step,
    and `matches` of those that were looked up how many tokens matched, 0 of the draft's, −1 of those for which neither
    was run. `drafting` says how the request was drafted: by the "head" alone and up to K, as "auto" found fastest, or
    "off". `structured` is an answer that a grammar constrained. The log gives `seq`; before that it is None. `domain`
    and `finish_reason` are words, so that no text hides in them.
    """

    # An error's message may end up in a service's log, which has nobody's consent.
    model_config = ConfigDict(hide_input_in_errors=True)

    seq: int | None = None
    id: str = Field(pattern=r"^[\x21-\x7e]{1,128}$")
    time_ms: int
    subject: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")
    aliases: list[Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")]] | None = None
    key: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")
    group: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    domain: Domain
    consent: Consent
    scrubber_revision: int
    target_version: int
    server: str | None = Field(default=None, pattern=r"^[\x21-\x7e]{1,128}$")
    draft_version: int | None
    prompt: str | None = None
    completion: str | None = None
    prompt_ids: list[Count] | None = None
    completion_ids: list[Count] | None = None
    drafted: list[Count] | None = None
    accepted: list[Count] | None = None
    drafted_ids: list[list[Count]] | None = None
    sampling: dict[str, JsonValue] = Field(default_factory=dict)
    finish_reason: str = Field(pattern=r"^[a-z_]{1,32}$")
    first_token_ms: Milliseconds | None = None
    per_token_ms: Milliseconds | None = None
    speculating: bool
    drafting: Literal["auto", "head", "off"] = "head"
    matches: list[Annotated[int, Field(ge=UNDRAFTED)]] | None = None
    structured: bool = False
    schema_version: Literal[1] = 1

    @field_validator("prompt", "completion", "sampling")
    @classmethod
    def _storable(cls, value: str | dict[str, JsonValue] | None) -> str | dict[str, JsonValue] | None:
        canonical_json(value)  # a lone surrogate raises ValueError here and not in the writer's thread
        return value

    @model_validator(mode="after")
    def _steps_agree(self) -> Self:
        if (self.drafted is None) != (self.accepted is None):
            raise ValueError("drafted and accepted come together or not at all")
        drafted, accepted = self.drafted or [], self.accepted or []
        if len(drafted) != len(accepted) or any(a > d for d, a in zip(drafted, accepted, strict=True)):
            raise ValueError(f"accepted {accepted} does not fit drafted {drafted}, step by step")
        if self.matches and len(self.matches) != len(drafted):
            raise ValueError(f"matches has {len(self.matches)} steps, drafted {len(drafted)}")
        if self.drafted_ids is not None and [len(step) for step in self.drafted_ids] != drafted:
            raise ValueError(
                f"drafted_ids has steps of {[len(s) for s in self.drafted_ids]} tokens, drafted: {drafted}"
            )
        return self

    @classmethod
    def of_body(cls, seq: int, body: str) -> Self:
        """Return a row as the log has it: all but `seq` in one JSON text."""
        return cls.model_validate_json(body).model_copy(update={"seq": seq})

    def body(self) -> str:
        return self.model_dump_json(exclude={"seq"})

    def counted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return drafted and accepted tokens of the steps that count, as models/core/evaluation/acceptance.py says."""
        steps = zip(self.drafted or (), self.accepted or (), self.matches or [0] * len(self.drafted or ()), strict=True)
        kept = [(drafted, accepted) for drafted, accepted, match in steps if match != UNDRAFTED]
        return tuple(drafted for drafted, _ in kept), tuple(accepted for _, accepted in kept)


def row_of(name: str) -> str:
    """Return the id of the row that an answer is named by, which may be an answer given again."""
    return name.removesuffix(AGAIN)


def parse_domain(named: object) -> Domain:
    """Return the domain that a request or a row names, the default one for None; ValueError if it is no domain."""
    if named is None:
        return DEFAULT_DOMAIN
    if not isinstance(named, str) or re.fullmatch(DOMAIN, named) is None:
        raise ValueError(f"domain is {named!r}, wanted 1 to 32 of a-z, 0-9, _ and -")
    return named


def consent_level(header: str | None, store: bool | None, key_policy: str | None) -> Consent:
    """Return the strictest of `X-Redraft-Log`, OpenAI's `store` and the key's policy; None of each is silence."""
    said: list[Consent] = []
    if store is not None:
        said.append("full" if store is True else "none")
    spoken = [value for value in (header, key_policy) if value is not None]
    said += [value if isinstance(value, str) and value in CONSENT_LEVELS else "none" for value in spoken]
    return min(said, key=CONSENT_LEVELS.index, default="metadata")


def subject_of(key: str | None, user: object) -> str | None:
    """Return the hash under which a person's rows are logged and erased: HMAC-SHA256 of the user under the key.

    Without a key, a fixed one hides the name, which can be guessed.
    """
    if key is None and user is None:
        return None
    return hmac.new((key or "redraft").encode(), str(user or "").encode(), "sha256").hexdigest()


def subjects_named(key: str | None, said: Mapping[str, object]) -> list[str]:
    """Return the hashes of all names of whom a request or a row is for, each once; ValueError if a name is no text."""
    names = []
    for field in NAMED_BY:
        if (name := said.get(field)) is not None and not isinstance(name, str):
            raise ValueError(f"{field} is a {type(name).__name__}, wanted a text")
        names.append(name or None)
    hashed = (subject_of(key, name) for name in names if name is not None)
    return list(dict.fromkeys(one for one in hashed if one is not None))


def group_of(secret: bytes, key: str | None, named: object) -> str | None:
    """Return the hash under which a group of requests is kept: HMAC-SHA256 of key and name under the home's secret.

    Each key's groups are its own. ValueError if it is no name of a group, without the name, which is never kept in
    clear.
    """
    if named is None:
        return None
    if not isinstance(named, str) or re.fullmatch(GROUP, named) is None:
        came = f"{len(named)} characters" if isinstance(named, str) else f"a {type(named).__name__}"
        raise ValueError(f"a group is named by 1 to 128 printable ASCII characters without a space, got {came}")
    return hmac.digest(secret, canonical_json(["group", key, named]), "sha256").hex()


def redact(row: QueryRow, level: Consent) -> QueryRow | None:
    """Return what may be written of a row, or None if nothing may; its own consent is never widened.

    Metadata keeps counts, times, versions and numeric sampling settings: a stop string or a grammar is text too.
    """
    level = min(level, row.consent, key=CONSENT_LEVELS.index)
    if level == "none":
        return None
    if level == "full":
        return row
    numeric = {name: value for name, value in row.sampling.items() if isinstance(value, int | float)}
    return row.model_copy(update={"consent": level, "sampling": numeric, **dict.fromkeys(CONTENT_FIELDS)})


def require_loggable(row: QueryRow) -> None:
    """Raise ValueError if the row's consent does not allow it to be written as it is."""
    if row.seq is not None:
        raise ValueError(f"row {row.id} has seq {row.seq}; the log gives it")
    if row.consent == "none":
        raise ValueError(f"row {row.id} has consent 'none' and must not be written")
    if row.consent == "metadata":
        held = [name for name in CONTENT_FIELDS if getattr(row, name) is not None]
        held += [f"sampling.{name}" for name, value in row.sampling.items() if not isinstance(value, int | float)]
        if held:
            raise ValueError(f"row {row.id} has consent 'metadata' but holds {', '.join(held)}")
