"""The recipe: everything that tells one run from another, parsed whole before the first task starts.

One that ships is read by its name, any other TOML file by its path. Tables of methods are parsed by the method's own
`Params`, and only that imports torch. A recipe survives the trip through JSON, because Prefect keeps a run's parameters
that way.
"""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from models import catalog
from models.engines import EngineParams
from models.params import BaseParams, did_you_mean, validate, without_defaults
from models.serving import Serve
from models.stages import (
    TABLES,
    Finetune,
    Pretrain,
    Prune,
    Quantize,
    Select,
    Shrink,
    Text,
    Train,
    require_chain,
    require_read,
)
from models.types import Frozen, GateParams

DEFAULT_RECIPE = "smollm2-cpu"
_FOLDER = Path(__file__).parent / "recipes"
# Of a run that another one goes on from.
GOES_ON = {"schedule": "constant", "average": 0.3}

DOMAIN = r"^[a-z0-9_-]{1,32}$"  # what requests name, and the query log takes
Domain = Annotated[str, Field(pattern=DOMAIN)]


def _distill_params(table: Any) -> Any:
    if not isinstance(table, Mapping):
        return table
    from models.core.learning import distill  # torch

    return validate(distill.Params, table, "distill")


class Traffic(Frozen):
    """One domain's prompts, in three parts that share no group.

    Attributes:
        source: where they come from.
        num_train: prompts that the first draft is trained on; with 0 the domain is new to it.
        num_held_out: prompts that no draft is ever trained on.
        num_requests: prompts to send to a running service.
        send_groups: whether requests name their groups to it, so that it splits none of them either.
    """

    source: Annotated[BaseParams, catalog.Method("sources")]
    num_train: int = Field(0, ge=0)
    num_held_out: int = Field(ge=1)
    num_requests: int = Field(ge=1)
    send_groups: bool = False

    def sizes(self) -> dict[str, int]:
        """Return part to its number of prompts, without the empty ones."""
        sizes = {"train": self.num_train, "held_out": self.num_held_out, "requests": self.num_requests}
        return {part: size for part, size in sizes.items() if size}


class Generate(Frozen):
    """How the target answers the training prompts, greedily.

    Attributes:
        max_tokens: of each answer.
        concurrency: prompts in flight.
        num_golden: prompts whose outputs are kept as the reference that every draft must reproduce.
    """

    max_tokens: int = Field(128, ge=4)
    concurrency: int = Field(32, ge=1)
    num_golden: int = Field(8, ge=1)


class Regeneration(Frozen):
    """How logged prompts are answered again before a refresh trains, while the service does not answer.

    Attributes:
        max_tokens: of an answer, what was served included. What a request's limit cut off before is continued, at the
            temperature that it was served at, and is learnt in its place.
        temperature: at which each of the prompts is answered anew as well, beside what was served; left out, none is.
        per_domain: prompts of each domain, of the window's.
        max_minutes: it ends then, its waiting for the service included; what was said until then is learnt.
    """

    max_tokens: int = Field(128, ge=4)
    temperature: float | None = Field(None, ge=0, le=2)
    per_domain: int = Field(100, ge=1)
    max_minutes: float = Field(2.0, gt=0)


class Refresh(Frozen):
    """How much of the query log a refresh takes, and what it mixes in.

    Attributes:
        min_rows: with fewer rows waiting there is nothing to do.
        max_rows: the most rows of one refresh; the others wait for the next.
        held_out_fraction: share of a window's conversations that is held out of its training, to gate by, and trained
            on by the next refresh; what regression sets take comes off first.
        replay_per_domain: older rows of each domain that are trained again, so that it is not forgotten.
        pool: past champions that are scored on the rows of a domain whose acceptance fell, before anything is trained:
            the best there first, then the newest. 0 looks at none.
        max_share_per_key: share of the rows kept for a refresh that one API key can supply while others ask, all
            requests without a key counting as one; where that would keep fewer than `min_rows`, the refresh waits.
        share_wait_s: seconds after the first waiting row for which it waits for rows of other keys; then keys supply
            equally more until `min_rows` are kept.
        regenerate: logged prompts are answered again, and that is learnt too; left out, none are.
        distill: keys of [distill] that differ in a refresh, in which the learning rate does not fall unless one of them
            says so: its `schedule` is "constant" and its `average` 0.3.
    """

    min_rows: int = Field(200, ge=1)
    max_rows: int = Field(4000, ge=1)
    held_out_fraction: float = Field(0.25, gt=0, lt=1)
    replay_per_domain: int = Field(200, ge=0)
    pool: int = Field(3, ge=0)
    max_share_per_key: float = Field(0.5, gt=0, le=1)
    share_wait_s: float = Field(3600.0, ge=0, allow_inf_nan=False)
    regenerate: Regeneration | None = None
    distill: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.min_rows > self.max_rows:
            raise ValueError(f"min_rows {self.min_rows} is above max_rows {self.max_rows}")
        return self


class Gate(GateParams):
    """What a candidate is held to, and who has the last word on one that passed."""

    promote: Literal["auto", "approve"] = Field(
        "auto", description='"approve": a draft that passed waits until somebody promotes it'
    )


class PostPromotionParams(Frozen):
    """What a draft is held to after it was promoted.

    Attributes:
        alpha: chance that a draft which is no worse is ever rolled back.
        num_requests: compared without a loss, the draft passes.
        per_look: the most requests that are compared at a time.
        period_s: seconds between looks.
        max_wait_s: seconds after which fewer than `per_look` new requests are compared too.
    """

    alpha: float = Field(0.01, gt=0, lt=0.5)
    num_requests: int = Field(500, ge=1)
    per_look: int = Field(16, ge=1)
    period_s: float = Field(30.0, gt=0, allow_inf_nan=False)
    max_wait_s: float = Field(300.0, ge=0, allow_inf_nan=False)


class Schedule(Frozen):
    """When flows run by themselves, under `redraft up` or on a cluster.

    Attributes:
        build_cron: of flow `build`, None for never.
        refresh_interval_s: of flow `refresh`, None for only when acceptance fell or is low; with too few rows a refresh
            does nothing.
        retry_s: seconds that a domain whose acceptance fell or is low waits for the next refresh after one that did not
            help; twice as long after each further one.
        max_retry_s: the longest such wait.
        min_free_memory_gib: memory in GiB that a refresh wants at least, below the 90% of the machine's that may be
            used while it trains; one that took more wants as much the next time. With less it waits.
        retain_days: days that logged requests are kept; what is older is erased every night. None keeps them.
    """

    build_cron: str | None = None
    refresh_interval_s: float | None = Field(3600.0, gt=0)
    retry_s: float = Field(300.0, gt=0)
    max_retry_s: float = Field(21600.0, gt=0)
    min_free_memory_gib: float = Field(0.5, ge=0)
    retain_days: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _waits_fit(self) -> Self:
        if self.retry_s > self.max_retry_s:
            raise ValueError(f"retry_s {self.retry_s:g} is above max_retry_s {self.max_retry_s:g}")
        return self


class Keep(Frozen):
    """What a home keeps beyond what serves or may serve again; the rest goes every night and by `redraft clean`.

    Attributes:
        num_drafts: newest drafts whose files are kept.
        days: age in days from which files go, whatever their number.
        gib: size in GiB of drafts, results of steps, copies, history and sessions together; the oldest go first.
        log_mib: size in MiB from which the older half of a log goes.
    """

    num_drafts: int = Field(20, ge=1)
    days: float = Field(30.0, gt=1)
    gib: float = Field(20.0, gt=0)
    log_mib: float = Field(64.0, gt=0)


class Demo(Frozen):
    """What the demonstration sends.

    Attributes:
        first_domain: the domain that the first draft knows.
        new_domain: the domain that the traffic changes to.
        num_requests: requests of the new domain, which the refresh trains on.
        concurrency: requests in flight.
        held_out_per_domain: held-out prompts on which drafts are compared.
        stock: whether vLLM's own endpoint, compiled and without a draft, is timed at the end on the same prompts as the
            service, which takes a minute or two.
    """

    first_domain: Domain
    new_domain: Domain
    num_requests: int = Field(ge=1)
    concurrency: int = Field(8, ge=1)
    held_out_per_domain: int = Field(ge=1)
    stock: bool = True


class Recipe(Frozen):
    """One run, from the target to the endpoint; the tables from `text` to `quantize` are those of `models.stages`.

    Attributes:
        name: what the run is called; by default the file's name.
        seed: of every random choice.
        train: processes that train; left out, the command or the flow's process does.
    """

    name: str = Field(min_length=1)
    seed: int = 0
    target: Annotated[BaseParams, catalog.Method("targets")]
    text: dict[Domain, Text] = Field(default_factory=dict)
    select: Select | None = None
    pretrain: Pretrain | None = None
    shrink: Shrink | None = None
    prune: Prune | None = None
    finetune: Finetune | None = None
    quantize: Quantize | None = None
    train: Train | None = None
    traffic: dict[Domain, Traffic] = Field(min_length=1)
    generate: Generate = Generate()
    engine: Annotated[EngineParams, catalog.Method("engines")]
    draft: Annotated[BaseParams, catalog.Method("drafts")]
    distill: Annotated[SerializeAsAny[BaseParams], BeforeValidator(_distill_params)] = Field(
        default_factory=lambda: _distill_params({})
    )
    refresh: Refresh = Refresh()
    gate: Gate = Gate()
    post_promotion_test: PostPromotionParams = PostPromotionParams()
    serve: Serve = Serve()
    schedule: Schedule = Schedule()
    keep: Keep = Keep()
    demo: Demo | None = None

    @property
    def changes_target(self) -> bool:
        """Whether any stage makes another target of the recipe's own."""
        return any(getattr(self, name) is not None for name in TABLES)

    @property
    def target_tables(self) -> dict[str, Any]:
        """What the target is made by: its own table and, where stages change it, theirs and the text's."""
        names = ("target", *(("text", *TABLES) if self.changes_target else ()))
        return {name: without_defaults(table) for name in names if (table := getattr(self, name)) is not None}

    @property
    def num_draft_tokens(self) -> int:
        """K, for which drafts are trained, at which they are gated: the most that a step of serving drafts."""
        return self.engine.num_draft_tokens

    @property
    def first_domains(self) -> tuple[str, ...]:
        """The domains that the first draft is trained on."""
        return tuple(domain for domain, traffic in self.traffic.items() if traffic.num_train)

    def refresh_distill(self) -> BaseParams:
        """Return the settings of training in a refresh."""
        params: BaseParams = _distill_params({**self.distill.model_dump(), **GOES_ON, **self.refresh.distill})
        return params

    def require_served(self) -> None:
        """Raise ValueError if the engine can't serve as the recipe wants it."""
        catalog.load("engines", self.engine.name).require_serving(self.serve, self.draft)

    def _require_lessons(self) -> None:
        """Raise ValueError if the draft can't learn of such answers or teachers, or of prompts answered again."""
        from models.answers import require_source  # torch
        from models.core.drafting.draft_families import class_of, family_named
        from models.core.learning.teacher import require_reader

        procedure = class_of(family_named(self.draft.name)).procedure
        learning: tuple[Any, ...] = (self.distill, self.refresh_distill())
        for params, of_log in zip(learning, (False, True), strict=True):
            loss = None if procedure is None else params.over(procedure).loss
            require_source(params.answers, loss, of_log, self.first_domains, self.train is not None)
            if loss is not None:
                require_reader(params.teachers, loss)
            elif params.teachers:
                raise ValueError("teachers are for drafts that are trained, and this one has no weights")
        if (again := self.refresh.regenerate) is None:
            return
        if again.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"refresh.regenerate.max_tokens is {again.max_tokens}, and a prompt with its answer fits into "
                f"engine.max_model_len {self.engine.max_model_len}; choose less"
            )
        if procedure is None:
            raise ValueError("refresh.regenerate is for drafts that are trained, and this one has no weights")

    @model_validator(mode="after")
    def _tables_agree(self) -> Self:
        require_chain(self.text, {name: getattr(self, name) for name in TABLES})
        if self.shrink is not None:
            module = catalog.load("shrink", self.shrink.method.name)
            if hasattr(module, "require_engine"):
                module.require_engine(self.shrink.method, self.engine.name)
        if not self.first_domains:
            raise ValueError("no domain has num_train above 0, so there is nothing to train the first draft on")
        if self.num_draft_tokens < 1:
            raise ValueError(
                f"engine.num_draft_tokens is {self.num_draft_tokens}; a draft is trained, gated and served at 1 or more"
            )
        self._require_lessons()
        catalog.load("engines", self.engine.name).require_draft(self.draft, self.engine)
        require_read(self)
        if self.serve != Serve() or self.demo is not None:
            self.require_served()
        for domain in (self.demo.first_domain, self.demo.new_domain) if self.demo else ():
            if domain not in self.traffic:
                raise ValueError(f'demo names domain "{domain}"{did_you_mean(domain, self.traffic)}')
        return self


def shipped_recipes() -> dict[str, Path]:
    """Return name to file of the recipes that ship."""
    return {path.stem: path for path in sorted(_FOLDER.glob("*.toml"))}


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe that ships, by its name, or a TOML file; ValueError names the file, key or value at fault."""
    tables, where = _read(name_or_path)
    return parse_recipe(tables, where)


def changed_tables(name_or_path: str, changes: Sequence[str]) -> dict[str, Any]:
    """Return a recipe's tables with changes such as "distill.num_epochs=3", each a key and what TOML has for a value.

    A word that is no value in TOML is text. ValueError as `load_recipe`, or if a change has no key or no value.
    """
    tables, where = _read(name_or_path)
    for change in changes:
        key, given, value = change.partition("=")
        for line in (change, f"{key}={json.dumps(value, ensure_ascii=False)}") if given else ():
            with suppress(tomllib.TOMLDecodeError):
                _merge(tables, tomllib.loads(line))
                break
        else:
            raise ValueError(f'--set is "{change}", wanted KEY=VALUE such as distill.num_epochs=3')
    parse_recipe(tables, f"{where} with --set {' '.join(changes)}")
    return tables


def toml(tables: Mapping[str, Any]) -> str:
    """Write tables of a recipe, after the keys that stand in none; values are what JSON has, but no null."""
    lines = [f"{_key(name)} = {_value(value)}" for name, value in tables.items() if not isinstance(value, Mapping)]
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            continue
        lines += [f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in table.items()), ""]
    return "\n".join(lines).rstrip()


def _merge(tables: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(tables.get(key), dict):
            _merge(tables[key], value)
        else:
            tables[key] = value


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _read(name_or_path: str) -> tuple[dict[str, Any], str]:
    shipped = shipped_recipes()
    path = shipped.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ValueError(f'no TOML file and no recipe "{name_or_path}"{did_you_mean(name_or_path, shipped)}')
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ValueError(f"{path} can't be read as TOML: {error}") from error
    return {"name": path.stem, **tables}, path.name


def parse_recipe(tables: Mapping[str, Any], where: str) -> Recipe:
    """Build a recipe from a TOML file's tables; ValueError starts with `where` and names the key or method at fault."""
    return validate(Recipe, tables, where, wrong_first=True)
