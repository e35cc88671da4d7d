"""EAGLE-3 heads: how one drafts, in training as in serving ("training-time test").

The state that it first reads is a product of several of the target's residual streams, and then its own output before
the final norm. Queries, keys and values are products of the normed embedding and the normed state side by side.

Heads that others trained may have a layer of Qwen3's kind (`model_type`), and norms that one made here has not:

- `norm_before_fc`: of all that is tapped, side by side, before its product; `fc_norm`: of each tapped state;
- `norm_before_residual`: the layer's output is added to the normed state instead of the raw one;
- `norm_output`: what it reads of its own output is normed as well (EAGLE-3.1, vllm-project/vllm#42764).

The draft vocabulary is a subset of the target's. `d2t[i]` is the target's id of draft token i, minus i; a head that can
say every token has none, because the engine makes no room for it.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from models.core.checkpoints.loading import choose_vocabulary, read_tensor, tensor_names
from models.core.checkpoints.readout import Readout
from models.core.drafting import draft_format
from models.core.drafting.draft_format import WEIGHTS, fused, require_llama_layout, require_vocab_size
from models.core.drafting.drafters import require_width
from models.core.drafting.features import FeatureDraft, LayeredDraft, Scale, decoder_layer, layer_config, linear
from models.drafts import EngineWeights, Procedure
from models.losses import forward_kl
from models.params import BaseParams
from models.targets import MODEL_TYPES, target_config


class HeadParams(BaseParams):
    """Shape of a new head.

    Attributes:
        vocab_size: D, at most the target's.
        aux_layers: which residual streams are read, counted as layers done; by default a third, two thirds and all of
            them.
    """

    vocab_size: int = 4096
    aux_layers: tuple[int, ...] | None = None

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return which residual streams of a target are read; ValueError if it has none such."""
        layers = self.aux_layers or tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= num_layers:
            raise ValueError(f"aux_layers must ascend within 0 to {num_layers}; got {list(layers)}")
        return layers

    def more(self, vocab_size: int) -> dict[str, Any]:
        """Return what else the config.json of a head says, for a target of `vocab_size` tokens."""
        return {}


class MaskedParams(HeadParams):
    """Shape of a new draft that reads a mask in places where no token is known.

    Attributes:
        mask_token_id: the target's token that is read where none is known; its last one by default.
    """

    mask_token_id: int | None = Field(None, ge=0)

    def mask(self, vocab_size: int) -> int:
        """Return the token, for a target of `vocab_size` tokens."""
        return vocab_size - 1 if self.mask_token_id is None else self.mask_token_id


class TappedDraft(LayeredDraft):
    """A draft that reads tapped states through one product, and says the tokens of a vocabulary of its own.

    What makes it sets `fc`, `norm`, `lm_head` and `d2t`.
    """

    d2t: Tensor
    fc: nn.Linear
    norm: Scale
    lm_head: nn.Linear

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        hidden = config["hidden_size"]
        self.fc = linear(len(config["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        self.make_layers()
        self.norm = Scale(hidden)
        self.lm_head = linear(hidden, config["draft_vocab_size"]).requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64), is_subset(config))

    @abstractmethod
    def make_layers(self) -> None:
        """Set the modules between `fc` and `norm`."""

    @property
    def vocabulary(self) -> Tensor:
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(self.config["eagle_aux_hidden_state_layer_ids"])

    @property
    def unrounded(self) -> Sequence[nn.Module]:
        return (self.fc,)

    def combine(self, hidden: Tensor) -> Tensor:
        require_width(self, hidden, self.fc.in_features)
        combined: Tensor = self.fc(hidden)
        return combined

    def say(self, state: Tensor, step: int = 0) -> tuple[Tensor, Tensor]:
        hidden = self.normed(state, self.norm)
        return hidden, self.lm_head(hidden)


Tapped = TypeVar("Tapped", bound=TappedDraft)


class Eagle3(TappedDraft, FeatureDraft):
    """The head; parameters carry the names of the checkpoint."""

    procedure = Procedure(loss=forward_kl.Params())
    any_layout = True

    def make_layers(self) -> None:
        config, width, norms = self.config, self.config["hidden_size"], ("input_layernorm", "hidden_norm")
        self.norm_before_residual = bool(config.get("norm_before_residual"))
        self.norm_output = bool(config.get("norm_output"))
        self.input_norm = Scale(self.fc.in_features) if config.get("norm_before_fc") else None
        self.fc_norm = nn.ModuleList(Scale(width) for _ in self.taps) if config.get("fc_norm") else None
        self.midlayer = decoder_layer(config, 2 * width, norms, head_norms=config["model_type"] == "qwen3")

    def combine(self, hidden: Tensor) -> Tensor:
        require_width(self, hidden, self.fc.in_features)
        if self.input_norm is not None:
            hidden = self.normed(hidden, self.input_norm)
        if self.fc_norm is not None:
            states = zip(hidden.chunk(len(self.fc_norm), dim=-1), self.fc_norm, strict=True)
            hidden = torch.cat([self.normed(state, cast("Scale", norm)) for state, norm in states], dim=-1)
        return super().combine(hidden)

    def advance(self, step: int, state: Tensor, *rest: Any) -> Tensor:
        """See the base; its own output is normed before it reads it where the head was trained so."""
        return super().advance(step, self.normed(state, self.norm) if step and self.norm_output else state, *rest)

    @property
    def layer(self) -> Any:
        return self.midlayer

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self.embedding).to(state.dtype)
        both = (embedded, self.layer["input_layernorm"]), (state, self.layer["hidden_norm"])
        return torch.cat([self.normed(x, norm) for x, norm in both], dim=-1)

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        return self.normed(state, self.layer["hidden_norm"]) if self.norm_before_residual else state


def engine_weights(directory: Path) -> EngineWeights:
    """Return the file of such a draft, with the names that its tensors have in vLLM, stacked as there.

    Its loader names the one layer of a head by number, as the layers of others are.
    """
    file = directory / WEIGHTS
    own = {"d2t": "draft_id_to_target_id", "lm_head.weight": "lm_head.weight", "mask_hidden": "mask_hidden"}
    names = {own.get(name, f"model.{name.replace('midlayer.', 'layers.0.')}"): name for name in tensor_names(file)}
    return EngineWeights(file, fused(names))


def require_mask(token_id: Any, vocab_size: int) -> int:
    """Return what is read where no token is known; ValueError if it is not one of the target's."""
    if not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
        raise ValueError(f"the mask must be a token of 0 to {vocab_size - 1}, the target's; got {token_id}")
    return token_id


def is_subset(config: dict[str, Any]) -> bool:
    """Whether a draft's vocabulary is a part of the target's, so that a map `d2t` tells which."""
    return bool(config["draft_vocab_size"] != config["vocab_size"])


class Format(draft_format.Format[Tapped]):
    """See the base; with the functions that make such a draft, and let it follow the traffic.

    `start` sets a new draft's layers, of the target's directory and the number of its last layer.
    """

    def __init__(
        self,
        family: str,
        architectures: tuple[str, ...],
        draft: Callable[[dict[str, Any]], Tapped],
        start: Callable[[Tapped, Path, int], None],
    ) -> None:
        super().__init__(family, architectures, draft)
        self._start = start

    def require_target(self, params: HeadParams, config: Any) -> None:
        """Raise ValueError if a target of a configuration has no such residual streams; see `models.drafts`."""
        params.layers(config.num_hidden_layers)

    def create(self, params: HeadParams, target_dir: Path, token_counts: np.ndarray) -> Tapped:
        """Make a draft that says what the target says of the deepest tapped layer; see `models.drafts.Family`."""
        source = target_config(target_dir)
        if not getattr(self._draft, "any_layout", False):
            require_llama_layout(source.model_type, self._family)
        require_vocab_size(params.vocab_size, source.vocab_size)
        last = source.num_hidden_layers
        taps = tapping(params.layers(last))
        config = {**layer_config(source), "draft_vocab_size": params.vocab_size, **taps}
        head = self.new(config | params.more(source.vocab_size), target_dir)
        with torch.no_grad():
            head.fc.weight.zero_()
            head.fc.weight[:, -source.hidden_size :] = torch.eye(source.hidden_size)
            self._start(head, target_dir, last - 1)
            head.norm.weight.copy_(_set_vocabulary(head, target_dir, token_counts).gain)
        return head

    def renew(self, draft: Tapped, target_dir: Path, token_counts: np.ndarray) -> Tapped:
        """Let the draft vocabulary follow the traffic within its size; new tokens' rows start from the target's."""
        known, before = draft.vocabulary, draft.lm_head.weight.detach().clone()
        _set_vocabulary(draft, target_dir, token_counts)
        kept = torch.isin(draft.vocabulary, known)
        with torch.no_grad():
            draft.lm_head.weight[kept] = before[torch.searchsorted(known, draft.vocabulary[kept])]
        return draft


def tapping(layers: tuple[int, ...]) -> dict[str, Any]:
    """Return the keys of a head's config.json that say which layers it reads, counted as layers done."""
    named = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return named if len(layers) == 3 else {**named, "num_aux_hidden_states": len(layers), "eagle_config": named}


def start_from_last_layer(head: Eagle3, target_dir: Path, last: int) -> None:
    """Start a head from the target's last layer, so that it drafts better than chance before it is trained.

    The hidden-state half of its attention and its MLP are the target's, the embedding half is zero. Beside a target of
    another layout than Llama's its matrices are noise, the same each time.
    """
    if target_config(target_dir).model_type not in MODEL_TYPES:
        rng = torch.Generator().manual_seed(0)
        for parameter in head.midlayer.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=rng)
        return
    hidden = head.config["hidden_size"]
    for name, parameter in head.midlayer.named_parameters():
        if name == "input_layernorm.weight":
            parameter.fill_(1.0)
            continue
        reads_both = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
        stored = read_tensor(target_dir, f"model.layers.{last}.{name.replace('hidden_norm', 'input_layernorm')}")
        (parameter.zero_()[:, hidden:] if reads_both else parameter).copy_(stored)


def _set_vocabulary(head: Tapped, target_dir: Path, token_counts: np.ndarray) -> Readout:
    """Let a head say the commonest tokens, as its target says them; return what the target says them by."""
    vocabulary = choose_vocabulary(token_counts, len(head.d2t))
    readout = Readout.load(target_dir, rows=vocabulary)
    with torch.no_grad():
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        head.lm_head.weight.copy_(readout.scale * readout.matrix)
    return readout
