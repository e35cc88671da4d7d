"""Shrinking: a model of a smaller shape, as a valid Hugging Face checkpoint.

A method's module has `shrink(model, documents, params, training, seed) -> PreTrainedModel`. It leaves the given model,
of Llama's layout, unchanged, and returns a new one of its class whose config says its shape; `documents` are token ids
to measure importance on, those that the seed draws, in pieces of `training.max_length`, and, where the method `TRAINS`
(optional), to train on; then it takes `work_dir` and `on_progress` of `models.core.learning.training.train` too.
ValueError where the model is of another layout, the shape is impossible for it,
or documents are too few or hold ids that it has not. `KEEPS_TOKENS` says whether the model's tokenizer fits what comes
out, which a served target needs; `require_engine(params, engine)`, optional, refuses an engine by name that can't run
what is stored; `CHANGES` and `KEEPS` are in `models.together`.

Letters: L blocks, H hidden width, A query heads, K KV heads, C channels of an MLP, B documents, T tokens of a document.
Heads keep their width, which engines are picky about.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from models.core.layers.linears import Norm, blocks
from models.core.layers.reshape import head_dim
from models.core.learning.training import cut
from models.params import BaseParams, TrainingParams
from models.targets import MODEL_TYPES


class Measured(BaseParams):
    """What methods that measure importance have in common.

    Attributes:
        num_documents: how many documents are measured on, at most; they are drawn by the seed.
    """

    num_documents: int = Field(64, ge=1)


class Widths(BaseParams):
    """The widths that are asked for; None keeps the model's.

    Attributes:
        hidden_size: H.
        intermediate_size: C, channels of an MLP.
        num_heads: A, query heads.
        num_kv_heads: K, key and value heads.
    """

    hidden_size: int | None = Field(None, ge=1)
    intermediate_size: int | None = Field(None, ge=1)
    num_heads: int | None = Field(None, ge=1)
    num_kv_heads: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _is_asked_for(self) -> Self:
        sizes = [*Widths.model_fields, "num_layers"]
        sizes.remove("name")
        if all(getattr(self, size, None) is None for size in sizes):
            raise ValueError(f"a shape is asked for by at least one of {', '.join(sizes)}")
        return self


class Shape(NamedTuple):
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int


def shape_of(model: PreTrainedModel) -> Shape:
    """Read a model's shape off its config; ValueError if the model is not of Llama's layout."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"shrinking takes models of {', '.join(MODEL_TYPES)}; got {config.model_type}")
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return Shape(*(getattr(config, key) for key in keys))


def wanted_shape(model: PreTrainedModel, params: Widths, num_layers: int | None = None) -> Shape:
    """Complete the shape that is asked for by what the model has; ValueError if it is no smaller, larger somewhere, or
    one that transformers or vLLM can't load."""
    has = shape_of(model)
    asked = {"num_layers": num_layers, **{key: getattr(params, key) for key in Widths.model_fields if key != "name"}}
    wanted = has._replace(**{key: value for key, value in asked.items() if value is not None})
    for key, value in wanted._asdict().items():
        if value > getattr(has, key):
            raise ValueError(f"{key} is asked to be {value}, the model has {getattr(has, key)}; it can only shrink")
    if wanted == has:
        raise ValueError(f"the model has this shape already: {has}")
    if wanted.num_heads % wanted.num_kv_heads:
        raise ValueError(f"num_heads {wanted.num_heads} is not divisible by num_kv_heads {wanted.num_kv_heads}")
    if wanted.num_heads // wanted.num_kv_heads > has.num_heads // has.num_kv_heads:
        raise ValueError(
            f"{wanted.num_heads} heads on {wanted.num_kv_heads} KV heads are more for each than the model's "
            f"{has.num_heads} on {has.num_kv_heads}; heads stay with the KV head they were trained with"
        )
    if wanted.hidden_size % wanted.num_heads:  # transformers refuses to load such a config
        raise ValueError(f"hidden_size {wanted.hidden_size} is not divisible by num_heads {wanted.num_heads}")
    width = head_dim(model.config)
    if model.config.model_type == "qwen2" and wanted.hidden_size != wanted.num_heads * width:
        raise ValueError(
            f"hidden_size {wanted.hidden_size} is not num_heads {wanted.num_heads} times the head's width {width}, "
            "which vLLM takes for granted in qwen2"
        )
    return wanted


def choose_heads(heads: Tensor, kv_heads: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Choose KV heads by importance [L, K], and equally many query heads of each by theirs [L, K, A/K].

    Returns:
        query heads [L, A'] and KV heads [L, K'] of that shape, ascending.
    """
    per_kv = shape.num_heads // shape.num_kv_heads
    kept = choose(kv_heads, shape.num_kv_heads)
    best = choose(heads, per_kv) + heads.shape[2] * torch.arange(heads.shape[1])[:, None]
    return best.gather(1, kept[..., None].expand(-1, -1, per_kv)).flatten(1), kept


def choose(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` highest scores of each row, ascending."""
    return scores.topk(count, dim=-1).indices.sort(dim=-1).values


def pieces(
    documents: Sequence[Sequence[int]], params: Measured, training: TrainingParams, seed: int
) -> list[list[int]]:
    """Draw documents to measure on, cut to the length that is trained on; ValueError if none has two tokens."""
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(seed)).tolist()
    return cut([documents[number] for number in order[: params.num_documents]], training.max_length)


@torch.no_grad()
def read(model: PreTrainedModel, documents: Sequence[Sequence[int]], hooks: Iterable[RemovableHandle]) -> None:
    """Let the decoder read each document by itself, so that hooks see no padding, and remove them."""
    model.eval()
    try:
        for document in documents:
            model.model(input_ids=torch.tensor([list(document)], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def norms(model: PreTrainedModel) -> list[Norm]:
    """Return the norms that read the residual stream."""
    inner = [norm for block in blocks(model) for norm in (block.input_layernorm, block.post_attention_layernorm)]
    return [*inner, model.model.norm]


def num_stored(model: PreTrainedModel) -> int:
    """Count the numbers that a checkpoint of a model holds."""
    factors = getattr(model.config, "redraft", {}).get("factors", False)
    return num_parameters(model) if factors else sum(parameter.numel() for parameter in model.parameters())


def num_parameters(model: PreTrainedModel) -> int:
    """Count a model's weights; a layer whose rank the config notes counts as its two factors."""
    ranks = getattr(model.config, "redraft", {}).get("ranks", {})
    shapes = {name: model.get_parameter(f"{name}.weight").shape for name in ranks}
    saved: int = sum(shape.numel() - ranks[name] * sum(shape) for name, shape in shapes.items())
    return sum(parameter.numel() for parameter in model.parameters()) - saved
