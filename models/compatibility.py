"""Whether a recipe's target, draft and engine go together, told before anything runs.

Only configuration files are read, so it takes seconds. What a target, a draft's family or an engine can't do it says
itself, in a ValueError; here all of them are asked, and every command that starts something asks here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models import catalog
from models.chats import ChatEncoder
from models.core.drafting.draft_families import class_of, family_named
from models.core.drafting.draft_format import require_llama_layout, require_vocab_size
from models.core.layers.decoder import require_known
from models.core.learning import distill
from models.recipe import Recipe
from models.targets import PLAIN_TEMPLATE


class Finding(NamedTuple):
    """What was found of one part of a recipe, or what is wrong with it."""

    part: str
    ok: bool
    found: str


def findings(recipe: Recipe) -> Iterator[Finding]:
    """Yield what is found of a recipe's parts, the target first: without one nothing else can be said."""
    target = catalog.load("targets", recipe.target.name)
    configs: list[Any] = []

    def of_target() -> str:
        configs.append(config := target.config(recipe.target))
        sizes = f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.vocab_size} tokens"
        return f"{config.model_type}, {sizes}"

    yield found("target", of_target)
    if configs:
        yield found("chat template", lambda: _chat_template(target.tokenizer(recipe.target)))
        yield found("draft", partial(_draft, recipe, *configs))
        yield found("engine", partial(_engine, recipe, *configs))


def found(part: str, look: Callable[[], str]) -> Finding:
    """Return what a look at a part finds; its ValueError is a fault."""
    try:
        return Finding(part, True, look())
    except ValueError as error:
        return Finding(part, False, str(error))


def require_compatible(recipe: Recipe, config: Any) -> None:
    """Raise ValueError if a target of a configuration does not go with a recipe's draft and engine."""
    _draft(recipe, config)
    _engine(recipe, config)


def _chat_template(tokenizer: Any) -> str:
    if not tokenizer.is_fast:
        raise ValueError("the target has no tokenizer.json, nor a file that one can be made of")
    ChatEncoder.of(tokenizer).encode([{"role": "user", "content": "Hello"}])
    is_plain = tokenizer.chat_template == PLAIN_TEMPLATE
    return "none; each message is a line, unless [target] chat_template names a file" if is_plain else "there is one"


def _draft(recipe: Recipe, config: Any) -> str:
    draft, family = recipe.draft, family_named(recipe.draft.name)
    if not class_of(family).any_layout:
        require_llama_layout(config.model_type, draft.name)
    for params in (recipe.distill, recipe.refresh_distill()):
        assert isinstance(params, distill.Params)  # which a recipe's fields can't say without importing torch
        if catalog.load("answers", params.answers.name).WRITES:
            require_known(config)
    if recipe.shrink is None:  # else the sizes are others by then
        if size := getattr(draft, "vocab_size", 0):
            require_vocab_size(size, config.vocab_size)
        if hasattr(family, "require_target"):
            family.require_target(draft, config)
    return f"family {draft.name}, K {recipe.num_draft_tokens}"


def _engine(recipe: Recipe, config: Any) -> str:
    engine, architecture = recipe.engine, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    catalog.load("engines", engine.name).require_target(architecture, config, recipe.draft, engine)
    return f"{engine.name} runs {architecture}, {engine.max_model_len} tokens at most"
