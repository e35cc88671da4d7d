"""Every key of a recipe does something: a value that should matter is seen in what its method makes, or refused.

`CHANGED` runs a method twice, with a key and without, and asks for a difference. Where that takes a service, an engine
or hours, `tests.models.readers` names the module that reads the key if it is not its table's own, and this asks that
it does. Of a new key in another place neither is so, and it fails.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel
from safetensors.torch import load_file
from torch import Tensor

from models import catalog
from models.adapters import attach
from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.core.throughput.cost import Cost, Time
from models.lengths import View
from models.losses import Drafted
from models.params import BaseParams
from models.recipe import Recipe
from tests.models.losses.test_losses_contract import columns
from tests.models.quantize.test_quantize_contract import DOCUMENTS, logits
from tests.models.readers import READERS
from tests.models.regimes.world import load, train
from tests.models.shrink.test_shrink_contract import SMALL, TRAINING, documents
from tests.models.trees.test_trees_contract import Model
from tests.models.verify.law import SAMPLED_CASES, first_blocks

ROOT = Path(__file__).parents[2]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the tables that a field's type holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def tables() -> list[type[BaseModel]]:
    """Return the class of every table of a recipe, those of each method included."""
    found = dict.fromkeys([Recipe, distill.Params])
    for family in catalog.families():
        modules = (catalog.load(family, name) for name in catalog.names(family))
        found |= dict.fromkeys(module.Params for module in modules if hasattr(module, "Params"))
    waiting = [*found]
    while waiting:
        inner = {one for field in waiting.pop().model_fields.values() for one in models_in(field.annotation)}
        waiting += [one for one in inner if one not in found]
        found |= dict.fromkeys(inner)
    return [one for one in found if one is not BaseParams]


def name_of(table: type[BaseModel]) -> str:
    return f"{table.__module__.removeprefix('models.').removeprefix('core.')}.{table.__name__}".removesuffix(".Params")


# Key to the module of its table.
KEYS = {
    f"{name_of(table)}.{key}": Path(sys.modules[table.__module__].__file__ or "").relative_to(ROOT).as_posix()
    for table in tables()
    for key in table.model_fields
    if key != "name"
}

# Of a method's key: what else is set, and the value that is held against the default; else the next value of its type.
CHANGED: dict[str, tuple[dict[str, Any], Any]] = {
    "lengths.hardware_aware.tree": ({}, {"name": "sequoia", "acceptance": [0.99]}),
    "losses.activation_boundary.margin": ({}, 0.1),
    "losses.log_acceptance.floor": ({}, 0.5),
    "losses.reverse_kl.least_prob": ({}, 0.9),
    "losses.tvd_plus_plus.least_deviation": ({}, 5.0),
    "targets.scratch.max_length": ({}, 64),
    "targets.scratch.num_heads": ({}, 2),
    "targets.scratch.num_kv_heads": ({}, 1),
    "sources.synthetic.domain": ({}, "other"),
    "trees.dynamic.max_depth": ({}, 1),
    "trees.dynamic.threshold": ({}, 0.3),
    "trees.dyspec.threshold": ({}, 0.3),
    "trees.sequoia.acceptance": ({}, [0.9]),
    "trees.sequoia.max_depth": ({}, 1),
    "trees.static.widths": ({}, [1, 1, 1]),
    "verify.knowledge_transfer.alpha": ({}, 0.9),
    "verify.momentum.alpha": ({}, 5.0),
    "verify.momentum.num_candidates": ({"alpha": 5.0}, 1),
    "verify.typical.delta": ({"epsilon": 1.0}, 0.01),
    "verify.typical.epsilon": ({"delta": 1.0}, 0.01),
    "prune.sparsegpt.block_size": ({}, 4),
    "prune.sparsegpt.dampening": ({}, 10.0),
    "adapters.last_layers.num_layers": ({}, 1),
    "adapters.qlora.rank": ({}, 8),
    "answers.rationales.domain": ({"weight": 0.5}, "d"),
    "adapters.lora.layers": ({}, ["q_proj"]),
    "adapters.qlora.layers": ({}, ["q_proj"]),
    "quantize.awq.clip": ({}, False),
    "quantize.awq.search_tokens": ({}, 2),
    "quantize.int8_static.percentile": ({}, 90.0),
    "quantize.llm_int8.threshold": ({}, 1.0),
    "quantize.gptq.damping": ({}, 0.9),
    "shrink.width.hidden_size": ({}, 64),
    "shrink.width.intermediate_size": ({}, 64),
    "shrink.width.num_heads": ({}, 1),
    "shrink.width.num_kv_heads": ({"num_heads": 2}, 2),
    "shrink.width.num_documents": ({}, 1),
    "shrink.depth.num_layers": ({}, 1),
    "shrink.low_rank.share": ({}, 0.2),
    "shrink.low_rank.num_documents": ({}, 1),
    "shrink.sheared.hidden_size": ({}, 64),
    "shrink.sheared.intermediate_size": ({}, 64),
    "shrink.sheared.num_heads": ({}, 1),
    "shrink.sheared.num_kv_heads": ({"num_heads": 2}, 2),
    "shrink.sheared.num_layers": ({}, 1),
    "shrink.sheared.min_mask_steps": ({}, 999),
    "shrink.sheared.warmup": ({"mask_share": 0.9}, 0.9),
    "regimes.layer_dropout.max_probability": ({}, 0.9),
    "regimes.layer_dropout.rotation": ({}, 1),
    "regimes.layer_skip_gate.floor": ({"start": 0.3}, 0.6),
    "regimes.lognormal_gradient.exponent_bits": ({}, 1),
    "regimes.minibatch_drop.probability": ({}, 0.9),
    "regimes.early_bird.epsilon": ({"window": 1}, 1e-9),
    "regimes.early_bird.window": ({"epsilon": 0.99}, 1),
    "regimes.early_bird.ticket": ({"window": 1, "epsilon": 0.99}, "random"),
    "regimes.early_bird.then": ({"window": 1, "epsilon": 0.99}, "stop"),
    "regimes.early_bird.pruned_share": ({"window": 1, "epsilon": 0.99}, 0.6),
    "regimes.early_bird.penalty": ({}, 1.0),
    "regimes.iterative_magnitude.rewind": ({"num_rounds": 1}, 0.9),
    "regimes.iterative_magnitude.ticket": ({"num_rounds": 1}, "random"),
    "regimes.iterative_magnitude.pruned_share": ({"num_rounds": 1}, 0.9),
    "regimes.iterative_magnitude.num_rounds": ({}, 1),
    "regimes.hybrid_bfp.mantissa_bits": ({}, 3),
    "regimes.hybrid_bfp.wide_bits": ({}, 8),
    "regimes.hybrid_bfp.tile": ({}, 2),
    "regimes.predictive_sign_gradient.beta": ({}, 1.0),
    "regimes.predictive_sign_gradient.activation_bits": ({}, 4),
    "regimes.predictive_sign_gradient.gradient_bits": ({}, 10),
    "regimes.predictive_sign_gradient.activation_msb": ({}, 2),
    "regimes.predictive_sign_gradient.gradient_msb": ({}, 2),
    "regimes.lognormal_gradient.num_bits": ({}, 3),
    "regimes.lognormal_gradient.sparsity": ({}, 0.9),
    "regimes.dorefa.activation_clip": ({}, 0.5),
    "regimes.packing.row_tokens": ({}, 40),
    "regimes.blockwise_local.num_groups": ({}, 2),
}


def other(table: type[BaseModel], key: str, value: Any) -> Any:
    """Return another value of a key's type."""
    annotation = table.model_fields[key].annotation
    if get_origin(annotation) is Literal:
        return next(one for one in get_args(annotation) if one != value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.5
    raise AssertionError(f"say in CHANGED what {name_of(table)}.{key} is to be held against")


def text(tensors: Any) -> str:
    """Return numbers as text, to be compared; those of a tensor by their digest, as writing them out takes longer."""
    if isinstance(tensors, Tensor):
        held = tensors.detach().double().contiguous().numpy().tobytes()
        return json.dumps([list(tensors.shape), hashlib.sha256(held).hexdigest()])
    if isinstance(tensors, dict):
        return json.dumps({name: text(one) for name, one in sorted(tensors.items())})
    return json.dumps(tensors)


def by_loss(method: ModuleType, params: Any, target: Path) -> str:
    known = columns()
    rows = known["token"] >= 0
    return text(method.loss(Drafted(known["draft_logits"], **{key: known[key] for key in method.NEEDS}), params)[rows])


def by_rule(method: ModuleType, params: Any, target: Path) -> str:
    proposal, p = first_blocks(SAMPLED_CASES["K=3 V=4"], 0, 200)
    more = {"text": [[1, 2, 3, 1, 2]] * 200} if hasattr(method, "READS_TEXT") else {}
    return text(method.verify(proposal, p, torch.Generator().manual_seed(0), params, **more).tokens)


def by_policy(method: ModuleType, params: Any, target: Path) -> str:
    cost = Cost.measured([Time(1, 1, 0, 10.0), Time(1, 4, 0, 12.0), Time(1, 2, 1, 12.2)])
    views = [View(8, ((3, accepted),) * 20, 1, cost, confidences=(0.9, 0.5)) for accepted in range(4)]
    ends = [method.go_on(view, params) for view in views] if hasattr(method, "go_on") else []
    return text([[method.num_draft_tokens(view, params) for view in views], ends])


def by_tree(method: ModuleType, params: Any, target: Path) -> str:
    proposal = method.grow(Model().expand, 16, params)
    return text([proposal.token_ids.tolist(), proposal.parents])


def by_pruning(method: ModuleType, params: Any, target: Path) -> str:
    rng = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(8, 32, generator=rng), torch.randn(64, 32, generator=rng)
    return text(method.prune(weight, Gram(inputs), Pattern(sparsity=0.5), params))


def by_adapter(method: ModuleType, params: Any, target: Path) -> str:
    adapted, rng = attach(load(target), params, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.trained.values():
            parameter += 0.02 * torch.randn(parameter.shape, generator=rng)
        said = adapted.model(torch.tensor(DOCUMENTS[:1])).logits
    return text([{name: list(one.shape) for name, one in adapted.trained.items()}, text(said)])


def by_quantizing(method: ModuleType, params: Any, target: Path) -> str:
    made = method.quantize(load(target), DOCUMENTS, params)
    return text([text(made.tensors), made.num_bytes, made.figures, text(logits(made.model))])


def by_regime(method: ModuleType, params: Any, target: Path) -> str:
    deep = params.name in LONG
    model = load(target, 4 if deep else None)
    report = train(model, [params], num_epochs=4 if deep else 2)
    return text([text(dict(model.state_dict())), report.figures])


def by_shrinking(method: ModuleType, params: Any, target: Path) -> str:
    try:
        made = method.shrink(load(target, 3), documents(), params, TRAINING, 0)
    except ValueError as error:  # a value of the key is refused: it is read
        return str(error)
    return text(dict(made.state_dict()))


def by_target(method: ModuleType, params: Any, target: Path) -> str:
    with TemporaryDirectory() as directory:
        method.build(params, Path(directory))
        weights = load_file(Path(directory) / "model.safetensors")
        config = json.loads((Path(directory) / "config.json").read_text())
    return text([text(weights), config])


def by_source(method: ModuleType, params: Any, target: Path) -> str:
    return json.dumps([repr(one) for one in (*method.prompts(params), *method.documents(params))])


def by_answers(method: ModuleType, params: Any, target: Path) -> str:
    samples = [Sample("a", "d", [1, 2], [3, 4, 5], rejected=[2]), Sample("b", "rationale", [1], [3, 4, 5], rejected=[])]
    if hasattr(method, "weigh"):
        return text(method.weigh(samples, params))
    return json.dumps(method.by_draft([9] * 40, params, torch.Generator().manual_seed(0)))


NEEDED = {
    **{f"shrink.{name}": settings for name, settings in SMALL.items()},
    "shrink.sheared": {**SMALL["sheared"], "min_mask_steps": 1},
    "targets.scratch": {"tokenizer": {"name": "random"}, "num_layers": 1, "intermediate_size": 64},
}
LONG = ("blockwise_local", "early_bird", "layer_dropout")  # regimes that two blocks or two epochs tell nothing of

OUTCOMES: dict[str, Callable[[ModuleType, Any, Path], str]] = {
    "losses": by_loss,
    "verify": by_rule,
    "lengths": by_policy,
    "trees": by_tree,
    "prune": by_pruning,
    "adapters": by_adapter,
    "quantize": by_quantizing,
    "regimes": by_regime,
    "shrink": by_shrinking,
    "answers": by_answers,
    "targets": by_target,
    "sources": by_source,
}
SHOWN = [key for key in KEYS if key not in READERS and key.split(".")[0] in OUTCOMES]
READ = {key: READERS.get(key, KEYS[key]) for key in KEYS if key not in SHOWN}


@pytest.fixture(scope="module")
def outcome(tiny_target: Path) -> Callable[[str, str, dict[str, Any]], str]:
    """Return what a method makes under some settings, which is computed once."""

    @cache
    def digest(family: str, name: str, settings: str) -> str:
        params = catalog.parse(family, {"name": name, **json.loads(settings)})
        made = OUTCOMES[family](catalog.load(family, name), params, tiny_target)
        return hashlib.sha256(made.encode()).hexdigest()

    return lambda family, name, settings: digest(family, name, json.dumps(settings, sort_keys=True))


@pytest.mark.parametrize("key", SHOWN)
def test_another_value_of_a_key_makes_something_else(
    key: str, outcome: Callable[[str, str, dict[str, Any]], str]
) -> None:
    family, name, last = key.split(".")
    own, value = CHANGED.get(key, ({}, None))
    own = {**NEEDED.get(f"{family}.{name}", {}), **own}
    if key not in CHANGED:
        params = catalog.parse(family, {"name": name, **own})
        value = other(type(params), last, getattr(params, last))
    assert outcome(family, name, own) != outcome(family, name, {**own, last: value})


def test_what_is_said_of_keys_is_said_of_keys_that_there_are() -> None:
    assert READERS.keys() <= KEYS.keys()
    assert CHANGED.keys() <= {*SHOWN}


def read_in(module: str) -> set[str]:
    """Return the attributes that a module reads and the strings that it names, but for its validators'."""
    tree = ast.parse((ROOT / module).read_text(encoding="utf-8"))
    checks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any("validator" in ast.unparse(one) for one in node.decorator_list)
    ]
    left_out = {id(node) for check in checks for node in ast.walk(check)}
    kept = [node for node in ast.walk(tree) if id(node) not in left_out]
    attributes = {node.attr for node in kept if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return attributes | {node.value for node in kept if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_a_key_whose_effect_is_not_shown_is_read_where_it_is_said_to_be() -> None:
    there = {module: read_in(module) for module in READ.values()}
    assert [key for key, module in READ.items() if key.rsplit(".", 1)[1] not in there[module]] == []
