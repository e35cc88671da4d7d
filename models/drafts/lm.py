"""A language model of its own: the target without most of its layers, distilled to say what the target would.

The kept layers are spread evenly from the first to the last, so that the embedding and the output matrix still meet the
layers they were trained with. Both matrices are the target's and stay as they are: at small sizes they are most of the
weights, and a draft that shares them starts from something. Unlike a head on the target's states it reads nothing of
the target, so a drafted token that was right is no different from one that was read: one unroll trains all of them.

Drafts may be nested: with the last norm and the output matrix, its first layers are a draft of their own. All are
trained at once (S2D), at the mean of their losses, and come out of one pass. So one training serves a target that wants
a cheaper draft too, or another target of the same vocabulary; and in decoding each token may be said by the smallest
that is sure of it (`models.core.drafting.reading`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.core.checkpoints.loading import load_floats, read_tensors
from models.core.drafting.draft_families import own, read_json
from models.core.drafting.draft_format import (
    WEIGHTS,
    Shapes,
    check_config,
    engine_weights,
    made_for,
    read_config,
    require_llama_layout,
    require_tensors,
    write_config,
)
from models.core.drafting.drafters import step_by_step
from models.core.drafting.reading import NestedReader, Reader
from models.core.layers.decoder import Decoder
from models.core.layers.reshape import spread_layers, take_layers
from models.drafts import Draft, KeepRows, Procedure, Rows, Unrolled
from models.losses import forward_kl
from models.params import BaseParams
from models.targets import TargetCard, describe, differing_tokens, target_config

PAPER = "arXiv:2302.01318; arXiv:1910.01108, section 3 (initialisation); arXiv:2407.01955 (nested drafts)"
FAMILY = "lm"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
NESTED = "nested"
HEAD = "draft_vocab_size"  # what the config of a head has that calls itself by one of these names too
SERVED = True


class Params(BaseParams):
    """Shape of a new draft.

    Attributes:
        num_layers: how many of the target's layers it keeps.
        nested: numbers of its first layers that are drafts of their own, ascending, such as [1, 2], for engine "torch";
            they are trained with it, and `redraft import-draft --layers` cuts one out.
    """

    name: Literal["lm"] = "lm"
    num_layers: int = 3
    nested: tuple[int, ...] = ()


class Lm(Draft):
    procedure = Procedure(loss=forward_kl.Params())
    max_unroll = 1
    expands = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head
        self.config = model.config
        for matrix in (self.model.embed_tokens, self.lm_head):
            matrix.requires_grad_(False)
        self._decoder: tuple[tuple[int, ...], Decoder] | None = None
        self._decoded_in: torch.dtype | None = None

    @property
    def nested(self) -> tuple[int, ...]:
        return tuple(getattr(self.config, "redraft", {}).get(NESTED, ()))

    @property
    def vocabulary(self) -> Tensor:
        return torch.arange(self.config.vocab_size, device=self.lm_head.weight.device)

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        # Right padding needs no mask: no token attends to a later one.
        states = self.model(input_ids=rows.token_ids, use_cache=False).last_hidden_state
        return self._unrolled(states, rows, num_steps, keep)

    def unroll_all(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[list[Unrolled]]:
        if not self.nested:
            return super().unroll_all(rows, num_steps, keep)
        made = self.model(input_ids=rows.token_ids, use_cache=False, output_hidden_states=True)
        nested = [self.model.norm(made.hidden_states[number]) for number in self.nested]
        return [self._unrolled(states, rows, num_steps, keep) for states in (made.last_hidden_state, *nested)]

    def _unrolled(self, states: Tensor, rows: Rows, num_steps: int, keep: KeepRows | None) -> list[Unrolled]:
        """Read what normed states [B, T, H] say."""

        def say(step: int, running: Tensor) -> tuple[Tensor, Tensor]:
            hidden = states[rows.sequence[running], rows.index[running] + 1 + step]
            return hidden, self.lm_head(hidden)

        return step_by_step(torch.arange(len(rows.index), device=rows.index.device), num_steps, keep, say)

    def pack(self, dtype: torch.dtype) -> Self:
        """See `models.drafts.Draft`; the forward pass that drafts packs its own."""
        self._decoder, self._decoded_in = None, dtype
        return self

    def drafter(self, max_len: int) -> Reader:
        return (NestedReader if self.nested else Reader)(self, max_len)

    def decoder(self) -> Decoder:
        """Return the forward pass that drafts, of the weights as they are now."""
        versions = tuple(parameter._version for parameter in self.parameters())
        if self._decoder is None or self._decoder[0] != versions:
            weight = self.lm_head.weight
            dtype = self._decoded_in or weight.dtype
            self._decoder = versions, Decoder(self.config, self.state_dict(), dtype, str(weight.device))
        return self._decoder[1]


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Lm:
    """Take layers out of the target; see `models.drafts.Family`."""
    config = target_config(target_dir)
    require_target(params, config)
    _require_nested(params.nested, params.num_layers)
    model = take_layers(load_floats(target_dir), spread_layers(config.num_hidden_layers, params.num_layers))
    return _for_target(model, describe(target_dir), params.nested)


def require_target(params: Params, config: Any) -> None:
    """Raise ValueError if a target of a configuration is of another layout, or has too few layers."""
    require_llama_layout(config.model_type, FAMILY)
    if not 1 <= params.num_layers < config.num_hidden_layers:
        raise ValueError(
            f"num_layers must be 1 to {config.num_hidden_layers - 1}, less than the target's; got {params.num_layers}"
        )


def publishes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a language model of a known layout, and of no head."""
    redraft = config.get("redraft")
    family = redraft.get("family", FAMILY) if isinstance(redraft, Mapping) else FAMILY
    return family == FAMILY and config.get("architectures") in [[one] for one in ARCHITECTURES] and HEAD not in config


def adopt(directory: Path, target_dir: Path) -> Lm:
    """Take a language model that says the target's tokens, such as a smaller one of its series, or a draft of another.

    It has a tokenizer.json beside its config.json and safetensors files, unless it is a draft that was made here.
    ValueError if its vocabulary is not the target's or it does not say what it is, a tensor is missing, or it is of
    another layout.
    """
    config, target = read_json(directory / "config.json"), describe(target_dir)
    if not publishes(config):
        raise ValueError(f"lm takes models of {', '.join(ARCHITECTURES)}; got {config.get('architectures')}")
    if config.get("vocab_size") != target.vocab_size:
        raise ValueError(f"the draft has vocab_size {config.get('vocab_size')}, the target has {target.vocab_size}")
    made = own(config, directory)
    if made.get("tokenizer_sha256") != target.tokenizer_sha256 and (other := differing_tokens(directory, target_dir)):
        raise ValueError(f"the draft's tokenizer is not the target's: {len(other)} tokens differ, such as {other[0]!r}")
    read_tensors(directory)  # safetensors or an error that says so: nothing else is loaded
    nested = _nested_in(config, directory)
    return _for_target(load_floats(directory), target, nested)


def context(directory: Path) -> int | None:
    return read_json(directory / "config.json").get("max_position_embeddings")


def readings(draft: Lm, directory: Path, target_dir: Path) -> dict[str, Lm]:
    """See `models.drafts.Adopter`; its files say all of it."""
    return {"": draft}


def cut(draft: Lm, num_layers: int) -> Lm:
    """Return the draft that a draft's first layers are; ValueError if they were not trained as one."""
    if num_layers not in draft.nested:
        raise ValueError(
            f"the first {num_layers} layers of this draft were not trained as one; nested in it are: "
            f"{', '.join(map(str, draft.nested)) or 'none'}"
        )
    whole = AutoModelForCausalLM.from_config(draft.config, dtype=torch.float32)
    whole.load_state_dict(draft.state_dict())
    model = take_layers(whole, range(num_layers))
    kept = [number for number in draft.nested if number < num_layers]
    model.config.redraft = {**model.config.redraft, NESTED: kept}
    return Lm(model)


def renew(draft: Lm, target_dir: Path, token_counts: np.ndarray) -> Lm:
    """Return the draft as it is: it can say every token already."""
    return draft


def save(draft: Lm, directory: Path) -> None:
    """Write config.json and bfloat16 safetensors into `directory`, as transformers and the engine load them."""
    shapes = expected_shapes(draft.config)
    tensors = {
        n: t.detach().to(torch.bfloat16).contiguous().cpu() for n, t in draft.state_dict().items() if n in shapes
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = draft.config.to_dict() | {"dtype": "bfloat16"}
    config.pop("_name_or_path", None)  # a path of this machine
    write_config(config, FAMILY, directory)


def load(directory: Path, target_dir: Path) -> Lm:
    """Read a draft back, in float32; ValueError as `check`."""
    check(directory, like=None, target=describe(target_dir))
    return Lm(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    config = read_config(directory, FAMILY, ARCHITECTURES)
    served = None if like is None else read_config(like, FAMILY, ARCHITECTURES)
    check_config(config, directory, served, target)
    nested = _nested_in(config, directory)
    if like is not None and served is not None and nested != (was := _nested_in(served, like)):
        raise ValueError(
            f"draft {directory.name} has others nested at {list(nested)}, the served draft at {list(was)}; a swap "
            "can't change that"
        )
    require_tensors(read_tensors(directory), expected_shapes(AutoConfig.from_pretrained(directory)))


def require_served(params: Params, num_draft_tokens: int) -> None:
    if params.nested:
        raise ValueError(f"vLLM drafts with all layers; got nested {list(params.nested)}: set nested = [] in [draft]")


def vllm_config(directory: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(directory)}


vllm_weights = engine_weights


def expected_shapes(config: Any) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {n: (tuple(t.shape), torch.bfloat16) for n, t in model.state_dict().items() if n not in tied}


def _for_target(model: Any, target: TargetCard, nested: Sequence[int]) -> Lm:
    model.config.redraft = made_for(target) | ({NESTED: list(nested)} if nested else {})
    return Lm(model)


def _nested_in(config: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    said = own(config, directory).get(NESTED, [])
    if not isinstance(said, list) or not all(isinstance(number, int) for number in said):
        raise ValueError(f"draft {directory.name}: config.json has {NESTED} {said!r}; wanted a list of numbers")
    _require_nested(said, config["num_hidden_layers"])
    return tuple(said)


def _require_nested(nested: Sequence[int], num_layers: int) -> None:
    if list(nested) != sorted(set(nested)) or (nested and not 0 < nested[0] <= nested[-1] < num_layers):
        raise ValueError(f"nested must ascend within 1 to {num_layers - 1}, less than num_layers; got {list(nested)}")
