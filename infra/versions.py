"""Versions in the registry: what one was made from and how it was gated, and whether it may be served.

MLflow keeps tags as strings, and anybody may change them, so they are read and written here and nowhere else. What does
not apply has no tag; how many tags a lineage has is one too, so that a missing one is noticed.

A draft's line starts with a draft that was trained from nothing. Its `parent` is the champion that it was trained from;
the registry's own `previous` is the champion that it replaced. A challenger is one or more checkpoints, one a window,
each of which `continues` the one before; all challengers of a champion share one error budget. A past champion that is
tried again is a version of its own: its parent is the one whose weights it has, and it was gated against the champion
of the day. So a line tells what a draft was trained on, and `predecessors` whom it had to beat.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, ValidationError

from infra.artifacts import Artifact
from models.types import Frozen, GateVerdict, Kind

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion

    from infra.registry import Registry
    from infra.windows import Window

NESTED = ("target", "window")
# Tags that hold the address of a directory.
SNAPSHOT_TAGS = ("window_uri", "gate_data", "samples_uri", "state_uri")


def _none_if_blank(value: object) -> object:
    return None if value == "" else value


def _from_json(value: object) -> object:
    """Parse the text of a tag; what is no JSON stays a text, which no field of this type takes."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError:
        return value


def _figures(value: object) -> object:
    return {} if value == "" else _from_json(value)


Number = Annotated[int | None, BeforeValidator(_none_if_blank)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Tau = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class _Tags(Frozen):
    """A value that is kept as tags: a field's alias is its tag's name, if that is another than its own."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    @classmethod
    def tag_names(cls) -> tuple[str, ...]:
        return tuple(_own_tags(cls).values())

    @classmethod
    def from_tags(cls, tags: Mapping[str, str]) -> Self:
        """Read the value off all the tags of a version; ValueError names those missing or that hold something else."""
        return cls._read(tags)

    @classmethod
    def _read(cls, tags: Mapping[str, str], **parts: "_Tags | None") -> Self:
        try:
            own = {name: tags[name] for name in _own_tags(cls).values() if name in tags}
            return cls.model_validate({**own, **parts})
        except ValidationError as error:
            faults = []
            for detail in error.errors():
                tag = str(detail["loc"][0])
                found = f"is {tags[tag][:60]!r}: {detail['msg']}" if tag in tags else "is missing"
                faults.append(f"tag {tag} {found}")
            raise ValueError("; ".join(faults)) from error

    def to_tags(self) -> dict[str, str]:
        return {tag: _text(getattr(self, name)) for name, tag in _own_tags(type(self)).items()}


class Target(_Tags):
    name: str = Field(validation_alias="target_name")
    sha256: str = Field(validation_alias="target_sha256")
    tokenizer_sha256: str
    vocab_size: int
    chat_template_sha256: str


class TrainedWindow(_Tags):
    """The rows that a draft was trained on; `sha256` is over them, `uri` has the samples."""

    first_seq: int = Field(validation_alias="window_first_seq")
    last_seq: int = Field(validation_alias="window_last_seq")
    sha256: str = Field(validation_alias="window_sha256")
    uri: str = Field("", validation_alias="window_uri")


class Lineage(_Tags):
    """Where a draft came from.

    Attributes:
        parent: the champion that it was trained from, None if from nothing or elsewhere; of a past draft that returns,
            the version that has the same weights.
        continues: the checkpoint that it resumed, which the gate had left undecided against the same champion; None
            where it started from the champion itself.
        window: what it was trained on beyond its first samples.
        sampling: how the target answered the first samples.
        quantization: method that stored the target in fewer bits.
        gate_test: which challenger of its champion it is; the first draft of a line is none, 0.
        gated_against: the champion that a draft from elsewhere, or one that returns, was gated against.
        returns_for: the domain that a past draft was tried again for, "" for all other drafts.
        tau: domain to mean accepted length on held-out conversations.
        coverage: domain to the share of these conversations' answers that the draft's vocabulary has, of their tokens.
        golden_tau: the same on the target's golden prompts; the service measures it again.
        regression_sets: domain to the version of the regression set that it was held to.
        gate_data: the conversations that it was gated by; beside the log it is known which rows these are.
        unlike: domain to by how many nats a token its imported answers are likelier to the target than its own, where
            they are shown to be unlike these: then it is gated by the target's own answers.
        num_draft_tokens: K that it was trained and measured for.
        trained_context: tokens of the longest text that it learnt from, prompt and answer; of a draft from elsewhere
            what its files say, where that is less than the target reads. None where it is not known.
        source, source_sha256: the directory that a draft from elsewhere was read from.
        source_reading: what its files leave open and was measured, with τ of each reading; "" where they don't.
        source_layers: how many of its first layers were taken, None for all that it is.
        samples_uri, samples_sha256: the answers that its line started with.
        state_uri, state_sha256: what a training run that goes on from it takes over beside its weights, "" if nothing.
        teachers: sha256 of the weights of each model whose word it learnt beside the target's, to its name and its
            weight in the mean.
    """

    target: Target
    target_version: Number
    parent: Number
    window: TrainedWindow | None
    sampling: Annotated[dict[str, JsonValue] | None, BeforeValidator(_from_json)]
    quantization: str
    git_commit: str
    flow_run: str
    gate: Annotated[GateVerdict | None, BeforeValidator(_none_if_blank)]
    gate_reasons: str = ""
    gate_test: Annotated[int, BeforeValidator(lambda value: 0 if value == "" else value)] = 0
    gated_against: Number = None
    returns_for: str = ""
    line: str = ""
    tau: Annotated[dict[str, Tau], BeforeValidator(_figures)] = Field(default_factory=dict)
    coverage: Annotated[dict[str, Share], BeforeValidator(_figures)] = Field(default_factory=dict)
    golden_tau: Annotated[Tau | None, BeforeValidator(_none_if_blank)] = None
    regression_sets: Annotated[dict[str, str], BeforeValidator(_figures)] = Field(default_factory=dict)
    gate_data: str = ""
    unlike: Annotated[dict[str, float], BeforeValidator(_figures)] = Field(default_factory=dict)
    num_draft_tokens: Annotated[int | None, Field(ge=1), BeforeValidator(_none_if_blank)] = None
    trained_context: Annotated[int | None, Field(ge=1), BeforeValidator(_none_if_blank)] = None
    source: str = ""
    source_sha256: str = ""
    source_reading: str = ""
    source_layers: Annotated[int | None, Field(ge=1), BeforeValidator(_none_if_blank)] = None
    samples_uri: str = ""
    samples_sha256: str = ""
    state_uri: str = ""
    state_sha256: str = ""
    continues: Number = None
    teachers: Annotated[dict[str, JsonValue], BeforeValidator(_figures)] = Field(default_factory=dict)
    seed: Number = None

    @property
    def gate_champion(self) -> int | None:
        return None if self.gate is None else self.gated_against or self.parent

    @property
    def returns(self) -> str:
        """Which draft returns in it, and for what; "" for a draft of its own."""
        return f"draft {self.parent} returns for {self.returns_for}" if self.returns_for else ""

    @classmethod
    def tag_names(cls) -> tuple[str, ...]:
        return (*Target.tag_names(), *_own_tags(cls).values(), *TrainedWindow.tag_names())

    @classmethod
    def from_tags(cls, tags: Mapping[str, str]) -> Self:
        if (count := tags.get(COUNT)) is not None:  # earlier revisions wrote empty ones instead
            found = sum(name in tags for name in cls.tag_names())
            if not count.isdecimal() or found < int(count):
                raise ValueError(f"{found} tags of its lineage are there; tag {COUNT} is {count[:60]!r}")
            tags = {**dict.fromkeys(cls.tag_names(), ""), **tags}
        blank = all(tags.get(name, "") == "" for name in TrainedWindow.tag_names())
        window = None if blank else TrainedWindow.from_tags(tags)
        return cls._read(tags, target=Target.from_tags(tags), window=window)

    def to_tags(self) -> dict[str, str]:
        window = dict.fromkeys(TrainedWindow.tag_names(), "") if self.window is None else self.window.to_tags()
        return {**self.target.to_tags(), **super().to_tags(), **window}


def _own_tags(model: type[_Tags]) -> dict[str, str]:
    """Return field to tag, without the fields that are values of several tags themselves."""
    fields = model.model_fields.items()
    return {name: str(field.validation_alias or name) for name, field in fields if name not in NESTED}


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else "" if value is None else str(value)


SHA256 = r"^[0-9a-f]{64}$"
CLEANED = "cleaned"
COUNT = "lineage_tags"
ADDRESS = "address"  # of a version's files, where they were moved since MLflow was told
OWN_TAGS = ("sha256", "model_id", "previous", "quarantined", "forced", ADDRESS, CLEANED, COUNT)
FIRST = "none"  # before the first champion


class ForeignVersion(ValueError):
    """A version that somebody made or changed by hand: what is known of it can't be trusted, so it is not served."""


class Version(Frozen):
    """One registered directory; `sha256` is the digest of its manifest, `source` where MLflow says that it lies.

    Tags are parsed when they are asked for, so that a version that somebody damaged by hand can still be quarantined.
    """

    kind: Kind
    number: int = Field(ge=1)
    sha256: str = Field(pattern=SHA256)
    tags: dict[str, str]
    created_ms: int
    source: str = ""

    @cached_property
    def target(self) -> Target:
        """What the target is, or the one that the draft was made for."""
        with self._read():
            return Target.from_tags(self.tags)

    @cached_property
    def lineage(self) -> Lineage:
        with self._read():
            return Lineage.from_tags(self.tags)

    @property
    def previous(self) -> int | None:
        number = self.tags.get("previous", FIRST)
        if number == FIRST:
            return None
        if not number.isdecimal():
            raise ForeignVersion(f"{self.kind} {self.number}: tag previous is {number!r}, wanted a version's number")
        return int(number)

    @property
    def was_champion(self) -> bool:
        return "previous" in self.tags

    @property
    def quarantined(self) -> str:
        """Why it must never be served, "" if it may."""
        return self.tags.get("quarantined", "")

    @property
    def forced(self) -> str:
        """Why it was promoted against its gate, "" if it was not."""
        return self.tags.get("forced", "")

    @property
    def address(self) -> str:
        """Where its files lie for whoever wants them, "" where MLflow keeps them and hands them out."""
        logged = "model_id" in self.tags or not self.source.startswith(("file:", "s3:"))
        return self.tags.get(ADDRESS, "" if logged else self.source)

    @property
    def cleaned(self) -> str:
        """When its files were removed, "" while they are there (infra/clean.py)."""
        return self.tags.get(CLEANED, "")

    @contextmanager
    def _read(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise ForeignVersion(f"{self.kind} {self.number}: {error}") from error


class Pair(Frozen):
    target: Version
    draft: Version
    target_files: Artifact
    draft_files: Artifact


def model_name(prefix: str, kind: Kind) -> str:
    """Return the name of the model in MLflow whose versions those of a kind are."""
    return f"{prefix}-{kind}" if prefix else kind


def written_tags(kind: Kind, tags: Mapping[str, str]) -> dict[str, str]:
    """Return what is written of a version's tags: those that say something, and of a draft how many its lineage has."""
    told = {name: value for name, value in tags.items() if value not in ("", "{}")}
    return told | ({COUNT: str(sum(name in told for name in Lineage.tag_names()))} if kind == "draft" else {})


def as_version(version: "ModelVersion") -> Version:
    """Return what MLflow tells of a version; ForeignVersion if it was made or changed by hand."""
    sha256 = version.tags.get("sha256")
    if sha256 is None:
        raise ForeignVersion(f"{version.name} {version.version} was not registered by redraft: it has no tag sha256")
    if re.fullmatch(SHA256, sha256) is None:
        raise ForeignVersion(f"{version.name} {version.version}: tag sha256 is {sha256[:60]!r}, wanted a digest")
    return Version(
        kind=version.name.rpartition("-")[2],
        number=int(version.version),
        sha256=sha256,
        tags=version.tags,
        created_ms=version.creation_timestamp,
        source=version.source or "",
    )


def label(version: Version) -> str:
    """Return number and digest, by which a version is known: a number could come again in a new registry."""
    return f"{version.number}-{version.sha256[:12]}"


def cached(version: Version, cache: Path) -> Path:
    return cache / version.kind / label(version)


def is_quarantined(version: Version) -> bool:
    return "quarantined" in version.tags


def is_usable(version: Version) -> bool:
    return not is_quarantined(version) and not version.cleaned


def same_files(versions: Sequence[Version], artifact: Artifact | Version) -> list[Version]:
    """Return the versions that hold an artifact's or another version's files and may be served, in the order given."""
    return [one for one in versions if one.sha256 == artifact.sha256 and is_usable(one)]


def ancestors(registry: "Registry", version: Version) -> list[Version]:
    line = [version]
    while (parent := line[-1].lineage.parent) is not None:
        line.append(registry.get("draft", parent))
    return line


def predecessors(registry: "Registry", version: Version) -> list[Version]:
    """Return a draft, the champions that it was trained from or gated against, and theirs, newest first."""
    found, waiting = {version.number: version}, [version]
    while waiting:
        lineage = waiting.pop().lineage
        for number in (lineage.parent, lineage.gate_champion):
            if number is not None and number not in found:
                found[number] = registry.get("draft", number)
                waiting.append(found[number])
    return [found[number] for number in sorted(found, reverse=True)]


def past_champions(
    versions: Sequence[Version], champion: Version, domain: str, num_draft_tokens: int, window: "Window"
) -> list[Version]:
    """Return the drafts that served before the champion and may serve again, the best in a domain first.

    One was replaced by another draft, is of the same target and K, its files were never found bad, in whichever
    version, and are not the champion's. None that was trained on rows of the window counts: it is gated by what it
    never saw.

    Versions are newest first. The order is by τ, each at the gate of its own time; unknown ones come last.
    """
    replaced = {one.previous for one in versions}
    seen = ((one, one.lineage.window) for one in versions)
    out = {one.sha256 for one, rows in seen if is_quarantined(one) or (rows and rows.last_seq >= window.first_seq)}
    found: dict[str, Version] = {}
    for one in versions:
        fits = one.target.sha256 == champion.target.sha256 and one.lineage.num_draft_tokens == num_draft_tokens
        if one.number in replaced and fits and not one.cleaned and one.sha256 not in {*out, champion.sha256}:
            found.setdefault(one.sha256, one)
    return sorted(found.values(), key=lambda one: (one.lineage.tau.get(domain, 0.0), one.number), reverse=True)


def tried_again(versions: Sequence[Version], champion: int, domain: str) -> Version | None:
    """Return the past draft that was held against a champion, by its number, to return for a domain, if one was."""
    found = (one for one in versions if one.lineage.gate_champion == champion)
    return next((one for one in found if one.lineage.returns_for == domain), None)


def best_versions(line: Sequence[Version]) -> dict[str, Version]:
    """Return domain to the version of a line that was best there; of equals, the newest."""
    best: dict[str, Version] = {}
    for version in line:
        for domain, tau in version.lineage.tau.items():
            if domain not in best or tau > best[domain].lineage.tau[domain]:
                best[domain] = version
    return best


def challenger_to_go_on(versions: Sequence[Version], champion: int, first_seq: int) -> Version | None:
    """Return the checkpoint that the training on the next rows resumes, None where it starts from the champion.

    It is the champion's last challenger, if its gate was left undecided; not one of the same rows, from `first_seq` on,
    of which some were erased since. Versions are newest first.
    """
    found = ((one, one.lineage.window) for one in versions if one.lineage.parent == champion)
    last = next((one for one, seen in found if seen and seen.last_seq < first_seq), None)
    return None if last is None or last.lineage.gate != "undecided" or not is_usable(last) else last


def next_challenger(versions: Sequence[Version], champion: int) -> int:
    """Return which challenger of a champion the next new one is, from 1; refused ones and those from elsewhere too."""
    numbers = (one.lineage.gate_test for one in versions if one.lineage.gate_champion == champion)
    return 1 + max(numbers, default=0)


def trained_on(versions: Sequence[Version], window: "Window") -> list[Version]:
    wanted = (window.first_seq, window.last_seq, window.sha256)
    found = [(version, version.lineage.window) for version in versions]
    return [version for version, seen in found if seen and (seen.first_seq, seen.last_seq, seen.sha256) == wanted]
