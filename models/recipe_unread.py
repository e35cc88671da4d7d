"""What of a recipe nothing would read, because its tables decide it for each other: such a key is refused."""

from typing import TYPE_CHECKING, Any

from models import catalog
from models.params import BaseParams, TrainingParams, require_unsaid
from models.stages import Shrink, require_workers

if TYPE_CHECKING:
    from models.recipe import Recipe

_TRAINING = [key for key in TrainingParams.model_fields if key != "max_length"]  # that is read in calibrating, too


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
