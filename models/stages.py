"""The tables of a recipe that make another target of the one it starts from, all of them optional.

Text is what they train, calibrate and measure on; the other tables each switch a stage of flow `build` on. What can't
work is refused here, before the first stage has computed for hours. So is what of a recipe nothing would read, because
its tables decide it for each other.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from models import catalog
from models.core.checkpoints.sparsity import Pattern
from models.params import BaseParams, TrainingParams, did_you_mean, require_unsaid
from models.together import FLOAT, Declared, declared, require_compatible, require_exceptions, require_kept
from models.types import Frozen

if TYPE_CHECKING:
    from models.recipe import Recipe

_TRAINING = [key for key in TrainingParams.model_fields if key != "max_length"]  # that is read in calibrating, too


class Text(Frozen):
    """One domain's documents, in two parts that share no group.

    Attributes:
        source: where they come from.
        num_train: documents to train and to calibrate on; with [select], the pool that is selected from.
        num_held_out: documents that a target's loss is measured on.
    """

    source: Annotated[BaseParams, catalog.Method("sources")]
    num_train: int = Field(ge=1)
    num_held_out: int = Field(ge=1)

    def sizes(self) -> dict[Literal["train", "held_out"], int]:
        """Return part to its number of documents."""
        return {"train": self.num_train, "held_out": self.num_held_out}


class Train(Frozen):
    """Processes of a Ray cluster that train drafts, [pretrain] and [finetune] together, each on its share of a batch.

    Ray's variable `RAY_ADDRESS` names the cluster, whose nodes share the home; without it they run on this machine.

    Attributes:
        workers: how many.
        cpus: cores of each.
        gpus: of each.
        sharded: whether [pretrain] and [finetune] keep a share of the weights in each (FSDP2) instead of all (DDP).
    """

    workers: int = Field(ge=2)
    cpus: int = Field(1, ge=1)
    gpus: int = Field(0, ge=0)
    sharded: bool = False


class Trained(TrainingParams):
    """A stage that trains: the loop's settings are keys of its own table."""

    @property
    def training(self) -> TrainingParams:
        """The loop's settings."""
        return TrainingParams(**{name: getattr(self, name) for name in TrainingParams.model_fields})


def _require_one_of(family: str, method: BaseParams, can: Callable[[ModuleType], object], said: str) -> BaseParams:
    """Return a method; ValueError where it can't do what a stage asks of it, with those that can and `ELSEWHERE`."""
    modules = {name: catalog.load(family, name) for name in catalog.names(family)}
    if not can(modules[method.name]):
        why = said.format(method.name, getattr(modules[method.name], "ELSEWHERE", ""))
        raise ValueError(f"{why}; choose one of: {', '.join(name for name in modules if can(modules[name]))}")
    return method


class Select(Trained):
    """Which documents are worth training on, asked of a small proxy that learns from those chosen so far.

    Attributes:
        num_documents: to choose, of all domains together.
        num_rounds: K; each chooses num_documents / K.
        proxy: table of a target with the same tokenizer; by default the recipe's own target is the proxy.
    """

    method: Annotated[BaseParams, catalog.Method("select")]
    num_documents: int = Field(ge=1)
    num_rounds: int = Field(4, ge=1)
    proxy: Annotated[BaseParams, catalog.Method("targets")] | None = None

    @model_validator(mode="after")
    def _can_select(self) -> "Select":
        if self.num_documents < self.num_rounds:
            raise ValueError(f"num_documents {self.num_documents} is less than num_rounds {self.num_rounds}")
        if self.proxy is None and catalog.load("select", self.method.name).DRAFTS:
            said = "asks what the target accepts of a small model, so it needs a table proxy"
            raise ValueError(f'"{self.method.name}" {said}')
        return self


Regimes = Annotated[tuple[Annotated[BaseParams, catalog.Method("regimes")], ...], AfterValidator(require_compatible)]


class Pretrain(Trained):
    """Train the target on all of the text; `regimes` change how, and must go together."""

    regimes: Regimes = ()


class Shrink(Trained):
    """Give the target a smaller shape; methods that train do so with this table's settings."""

    method: Annotated[BaseParams, catalog.Method("shrink")]

    @field_validator("method")
    @classmethod
    def _keeps_the_tokens(cls, method: BaseParams) -> BaseParams:
        said = '"{}" leaves the target without a tokenizer that fits'
        return _require_one_of("shrink", method, attrgetter("KEEPS_TOKENS"), said)


class Prune(Frozen):
    """Zero weights of the target.

    Attributes:
        pattern: a share of zeroes such as 0.5, or "2:4".
        num_documents: to calibrate on.
        max_length: tokens of each.
    """

    method: Annotated[BaseParams, catalog.Method("prune")]
    pattern: Pattern
    num_documents: int = Field(32, ge=1)
    max_length: int = Field(256, ge=2)


class Second(Frozen):
    """A task that is learnt beside the first, such as the rationales of its answers ("distilling step-by-step").

    Attributes:
        domain: one of [text], another than the first task's.
        weight: λ of its loss, where the first task's counts 1.
    """

    domain: str
    weight: float = Field(1.0, ge=0, allow_inf_nan=False)


class Finetune(Trained):
    """Train few parameters on one domain and merge them, so that a plain target comes out.

    Where `learning_rate` is not given it is the method's own.

    Attributes:
        domain: one of [text].
    """

    method: Annotated[BaseParams, catalog.Method("adapters")]
    domain: str
    regimes: Regimes = ()
    second: Second | None = None

    @model_validator(mode="after")
    def _second_task_fits(self) -> "Finetune":
        if self.second is not None and self.second.domain == self.domain:
            raise ValueError(f'second.domain is "{self.domain}", which is the first task\'s; name another')
        for regime in self.regimes if self.second is not None else ():
            if "loop" in catalog.load("regimes", regime.name).CHANGES:
                raise ValueError(f'regime "{regime.name}" is a loop of its own, which has no second task')
        return self

    @model_validator(mode="before")
    @classmethod
    def _learns_at_the_methods_rate(cls, table: Any) -> Any:
        method = table.get("method") if isinstance(table, Mapping) else None
        name = method.get("name") if isinstance(method, Mapping) else getattr(method, "name", None)
        if name not in catalog.names("adapters"):
            return table
        return {"learning_rate": catalog.load("adapters", name).LEARNING_RATE, **table}

    @field_validator("method")
    @classmethod
    def _can_be_merged(cls, method: BaseParams) -> BaseParams:
        return _require_one_of("adapters", method, lambda module: hasattr(module, "fold"), '"{}" can\'t be merged: {}')


def _parse_exceptions(value: object) -> object:
    if not isinstance(value, Mapping):
        raise ValueError(f'wanted a table of patterns, such as {{ "*.mlp.down_proj" = "float" }}; got {value!r}')
    forms = {}
    for pattern, form in value.items():
        if not isinstance(form, Mapping | BaseParams) and form != FLOAT:
            raise ValueError(f'wanted a method\'s table or "float" for each pattern; got {form!r}')
        forms[pattern] = catalog.parse("quantize", form) if isinstance(form, Mapping) else form
    return forms


class Quantize(Trained):
    """Store the target in fewer bits, as the engine serves it; methods that train do so with this table's settings.

    Attributes:
        num_documents: to calibrate on, each cut to max_length.
        exceptions: pattern of layers' names, such as "*.mlp.down_proj", to another method's table, or to "float".
    """

    method: Annotated[BaseParams, catalog.Method("quantize")]
    num_documents: int = Field(64, ge=1)
    exceptions: Annotated[dict[str, Any], BeforeValidator(_parse_exceptions)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _exceptions_can_be_served_too(self) -> "Quantize":
        if self.exceptions:
            require_exceptions(self.method, self.exceptions)
        return self

    @field_validator("method")
    @classmethod
    def _can_be_served(cls, method: BaseParams) -> BaseParams:
        return _require_one_of("quantize", method, attrgetter("STORED"), 'a checkpoint of "{}" is not served: {}')


TABLES: dict[str, type[Frozen]] = {
    "select": Select,
    "pretrain": Pretrain,
    "shrink": Shrink,
    "prune": Prune,
    "finetune": Finetune,
    "quantize": Quantize,
}


def require_workers(train: Train | None, *stages: Pretrain | Finetune | None) -> None:
    """Raise ValueError if a stage has regimes that several processes can't train with, or shards that none reads."""
    there = [stage for stage in stages if stage is not None]
    if train is None:
        return
    if train.sharded and not there:
        raise ValueError("[train] sharded is for [pretrain] and [finetune], and the recipe has neither")
    for regime in (regime for stage in there for regime in stage.regimes):
        if train.sharded or "loop" in catalog.load("regimes", regime.name).CHANGES:
            what = "changes whole weights" if train.sharded else "is a loop of its own"
            raise ValueError(f'[train]: regime "{regime.name}" {what}, which takes one process')


def require_chain(text: Mapping[str, Text], tables: Mapping[str, Any]) -> None:
    """Raise ValueError if a stage has no text to work on, wants more than there is, or loses what one before made."""
    for name, table in tables.items():
        if table is not None and not text:
            raise ValueError(f"[{name}] works on text, so the recipe needs a table [text.DOMAIN]")
    finetune, select = tables["finetune"], tables["select"]
    asked = {"domain": finetune, "second.domain": finetune and finetune.second}
    for key, task in asked.items():
        if task is not None and task.domain not in text:
            raise ValueError(f'[finetune]: key "{key}": no [text.{task.domain}]{did_you_mean(task.domain, text)}')
    require_kept(one for name, table in tables.items() if table is not None for one in _declared(name, table))
    pool = sum(table.num_train for table in text.values())
    if select is not None and select.num_documents > pool:
        raise ValueError(f'[select]: key "num_documents" is {select.num_documents}, the pool of [text] has {pool}')


def _declared(name: str, table: Any) -> Iterator[Declared]:
    fields = type(table).model_fields
    if "method" in fields:
        [family] = (one.family for one in fields["method"].metadata if isinstance(one, catalog.Method))
        yield declared(family, table.method, f'"{table.method.name}" in [{name}]')
    for regime in getattr(table, "regimes", ()):
        yield declared("regimes", regime, f'"{regime.name}" in [{name}]')


def require_read(recipe: "Recipe") -> None:
    """Raise ValueError if nothing reads a table or key of a recipe, since tables decide it for each other; names it."""
    _require_read_stages(recipe)
    first: Any = recipe.distill
    refresh: Any = recipe.refresh_distill()
    if recipe.train is not None:
        require_unsaid(first, ["device"], "[distill]", "[train] gpus says what trains")
        require_unsaid(refresh, ["device"], "[refresh] distill", "[train] gpus says what trains")
    _require_learnt(recipe.draft, first, "[distill]", type(first).model_fields)
    _require_learnt(recipe.draft, refresh, "[refresh] distill", recipe.refresh.distill)
    if not (first.validation or refresh.validation):
        require_unsaid(refresh, ["patience"], "[distill]", "validation is 0")
    used = {value.name for _, value in recipe.engine if isinstance(value, BaseParams)}
    for family, method in (*first.heads, *refresh.heads):
        if method.name not in used:
            raise ValueError(
                f'[distill] {family} = "{method.name}" fits a head that engine "{recipe.engine.name}" would not read: '
                f"it decodes by {', '.join(sorted(used))}"
            )


def _require_read_stages(recipe: "Recipe") -> None:
    require_workers(recipe.train, recipe.pretrain, recipe.finetune)
    reads = recipe.pretrain is not None or recipe.finetune is not None
    for family in ("shrink", "prune", "quantize"):
        if (table := getattr(recipe, family)) is None:
            continue
        others = [form for form in getattr(table, "exceptions", {}).values() if isinstance(form, BaseParams)]
        own, *further = [catalog.load(family, method.name) for method in (table.method, *others)]
        trains = hasattr(own, "Hooks") or getattr(own, "TRAINS", False)
        calibrates = isinstance(table, Shrink) and getattr(table.method, "measures", True)
        calibrates = calibrates or any(getattr(module, "CALIBRATED", False) for module in (own, *further))
        reads = reads or trains or calibrates
        keys = [*(() if trains else _TRAINING), *(() if calibrates else ("num_documents",))]
        keys += [] if trains or calibrates else ["max_length"]
        why = f"{table.method.name} {'only trains' if trains else 'only calibrates' if calibrates else 'reads no text'}"
        require_unsaid(table, [key for key in keys if key in type(table).model_fields], f"[{family}]", why)
    if (select := recipe.select) is None:
        return
    if not reads:
        raise ValueError("[select] chooses text, and no later stage of this recipe reads any")
    if not catalog.load("select", select.method.name).TRAINS:
        require_unsaid(select, [*_TRAINING, "proxy"], "[select]", f"{select.method.name} trains no proxy")


def _require_learnt(draft: BaseParams, params: BaseParams, where: str, keys: Any) -> None:
    from models.core.drafting.draft_families import class_of, family_named  # torch

    kind = class_of(family_named(draft.name))
    if kind.procedure is None:
        require_unsaid(params, keys, where, f"a draft of family {draft.name} has no weights to train")
    elif kind.max_unroll == 1:
        later = {"step_decay", "follow"}
        require_unsaid(params, sorted(later & set(keys)), where, f"a draft of family {draft.name} is unrolled once")
