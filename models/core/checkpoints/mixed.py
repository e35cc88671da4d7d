"""One model in two quantized forms or more: a method for all layers but those that a pattern of their name excepts.

A pattern is a shell's, such as "*.mlp.down_proj" or "model.layers.0.*"; the first that fits a layer says what becomes
of it: another method of the same stored format, or "float" for the 16 bits of what is not quantized. Engines multiply
query, key and value as one matrix, and gate and up as another, so that a pattern takes all of those or none.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Any

from transformers import PreTrainedModel

from models import catalog
from models.core.layers.linears import linears, sparing
from models.params import BaseParams
from models.quantize import Quantized
from models.together import FLOAT


def chosen(names: Iterable[str], exceptions: Mapping[str, Any]) -> dict[str, str]:
    """Return layer to the first pattern that fits it; ValueError names a pattern that no layer is left for."""
    fitting = {name: [pattern for pattern in exceptions if fnmatchcase(name, pattern)] for name in names}
    first = {name: patterns[0] for name, patterns in fitting.items() if patterns}
    if idle := exceptions.keys() - set(first.values()):
        raise ValueError(f'exception "{min(idle)}" fits no linear layer of the decoder blocks')
    return first


def but(model: PreTrainedModel, exceptions: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return the context in which methods see all layers but the excepted ones."""
    return sparing(model, chosen((name for name, _ in linears(model)), exceptions))


def quantize(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], method: BaseParams, exceptions: Mapping[str, Any]
) -> Quantized:
    """Quantize a model by `method` but for some layers; see `models.quantize`.

    `exceptions` are of a pattern to settings of another method, or "float". ValueError if a pattern fits no layer, or
    as the methods.
    """
    names = [name for name, _ in linears(model)]
    pattern_of = chosen(names, exceptions)
    with sparing(model, pattern_of):
        made = catalog.load("quantize", method.name).quantize(model, documents, method)
    floats = [name for name, pattern in pattern_of.items() if exceptions[pattern] == FLOAT]
    tensors, scheme, figures = dict(made.tensors), made.scheme, dict(made.figures)
    if scheme is not None:
        scheme = {**scheme, "ignore": [*scheme["ignore"], *floats], "config_groups": dict(scheme["config_groups"])}
    for pattern, other in exceptions.items():
        layers = [name for name, fitting in pattern_of.items() if fitting == pattern]
        if other == FLOAT:
            continue
        done = {name: layer.weight.clone() for name, layer in linears(made.model) if name not in layers}
        with sparing(made.model, set(names) - set(layers)):
            own = catalog.load("quantize", other.name).quantize(made.model, documents, other)
        for name, weight in done.items():  # which were rounded to 16 bits beside the others
            own.model.get_parameter(f"{name}.weight").data.copy_(weight)
        made, figures = own, {**figures, **own.figures}
        for layer in layers:
            tensors.pop(f"{layer}.weight")
        tensors |= {name: tensor for name, tensor in own.tensors.items() if name.rpartition(".")[0] in layers}
        if scheme is not None and own.scheme is not None:
            group = {**own.scheme["config_groups"]["group_0"], "targets": layers}
            scheme["config_groups"][f"group_{len(scheme['config_groups'])}"] = group
    return Quantized(made.model, tensors, scheme, figures)
