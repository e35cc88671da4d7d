"""What a recipe says and nothing would read: refused when the recipe is read, since tables decide it for each other.

A key that another of its own table makes pointless is refused by that table (`models.params.require_unsaid`), and one
that an engine would not read with a family of drafts by the engine (`require_draft`).
"""

from typing import Any

from models import catalog
from models.params import BaseParams, TrainingParams, require_unsaid
from models.stages import Shrink

_TRAINING = [key for key in TrainingParams.model_fields if key != "max_length"]  # that is read in calibrating, too


def require_read(recipe: Any) -> None:
    """Raise ValueError if nothing reads a table or key of a recipe, a `models.recipe.Recipe`; names it."""
    _require_read_stages(recipe)
    first, refresh = recipe.distill, recipe.refresh_distill()
    _require_learnt(recipe.draft, first, "[distill]", type(first).model_fields)
    _require_learnt(recipe.draft, refresh, "[refresh] distill", recipe.refresh.distill)
    if not (first.validation or refresh.validation):
        require_unsaid(refresh, ["patience"], "[distill]", "validation is 0")
    _require_heads_read(recipe.engine, [first, refresh])


def _require_read_stages(recipe: Any) -> None:
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

    family = family_named(draft.name)
    if not family.TRAINED:
        require_unsaid(params, keys, where, f"a draft of family {draft.name} has no weights to train")
    elif class_of(family).max_unroll == 1:
        later = {"step_decay", "follow"}
        require_unsaid(params, sorted(later & set(keys)), where, f"a draft of family {draft.name} is unrolled once")


def _require_heads_read(engine: BaseParams, learning: list[Any]) -> None:
    values = [getattr(engine, key) for key in type(engine).model_fields]
    used = {value.name for value in values if isinstance(value, BaseParams)}
    for family, method in [head for params in learning for head in params.heads]:
        if method.name not in used:
            raise ValueError(
                f'[distill] {family} = "{method.name}" fits a head that engine "{engine.name}" would not read: it '
                f"decodes by {', '.join(sorted(used))}"
            )
