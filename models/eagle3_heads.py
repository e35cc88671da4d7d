"""EAGLE-3 heads: how one drafts, in training as in serving ("training-time test").

The state that it first reads is a product of several of the target's residual streams, and then its own output before
the final norm. Queries, keys and values are products of the normed embedding and the normed state side by side.

Heads that others trained may add the layer's output to the normed hidden state instead of the raw one
(`norm_before_residual`).

The draft vocabulary is a subset of the target's. `d2t[i]` is the target's id of draft token i, minus i; a head that can
say every token has none, because the engine makes no room for it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from models.checkpoint import output_embedding, read_stored, read_tensor
from models.draft_files import (
    Shapes,
    check_config,
    made_for,
    read_config,
    require_llama_layout,
    require_tensors,
    require_vocabulary,
    write_config,
)
from models.features import FeatureDraft, Scale, decoder_layer, layer_config, linear
from models.layers.vocabulary import choose_vocabulary
from models.params import BaseParams
from models.targets import TargetCard, describe

WEIGHTS = "model.safetensors"


class HeadParams(BaseParams):
    """Shape of a new head.

    Attributes:
        vocab_size: D, at most the target's.
        aux_layers: which residual streams are read, counted as layers done; by default a third, two thirds and all of
            them.
    """

    vocab_size: int = 4096
    aux_layers: tuple[int, ...] | None = None

    def more(self, vocab_size: int) -> dict[str, Any]:
        """Return what else the config.json of a head says, for a target of `vocab_size` tokens."""
        return {}


class Eagle3(FeatureDraft):
    """The head; parameters carry the names of the checkpoint."""

    d2t: Tensor

    def __init__(self, config: dict[str, Any], embedding: Tensor) -> None:
        super().__init__(config, embedding)
        hidden = config["hidden_size"]
        self.norm_before_residual = config.get("norm_before_residual", False)
        self.fc = linear(len(config["eagle_aux_hidden_state_layer_ids"]) * hidden, hidden)
        self.midlayer = decoder_layer(config, 2 * hidden, ("input_layernorm", "hidden_norm"))
        self.norm = Scale(hidden)
        self.lm_head = linear(hidden, config["draft_vocab_size"]).requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64), is_subset(config))

    @property
    def vocabulary(self) -> Tensor:
        """[D] target ids of the draft's tokens, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    @property
    def taps(self) -> tuple[int, ...]:
        """Which residual streams are read."""
        return tuple(self.config["eagle_aux_hidden_state_layer_ids"])

    @property
    def layer(self) -> Any:
        """See the base, as are the next four."""
        return self.midlayer

    def combine(self, hidden: Tensor) -> Tensor:
        """One product of all tapped states; ValueError if they are of another width."""
        if hidden.shape[-1] != self.fc.in_features:
            raise ValueError(
                f"{type(self).__name__} reads states of width {self.fc.in_features}; got width {hidden.shape[-1]}"
            )
        combined: Tensor = self.fc(hidden)
        return combined

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """The embedding, then the state, each normed; J = 2 H."""
        embedded = functional.embedding(token_ids, self.embedding).to(state.dtype)
        return torch.cat(
            [self.normed(embedded, self.layer["input_layernorm"]), self.normed(state, self.layer["hidden_norm"])], -1
        )

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        """The state."""
        return self.normed(state, self.layer["hidden_norm"]) if self.norm_before_residual else state

    def say(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """A norm and an output matrix of its own, of the draft's tokens."""
        hidden = self.normed(state, self.norm)
        return hidden, self.lm_head(hidden)


def is_subset(config: dict[str, Any]) -> bool:
    """Whether a draft's vocabulary is a part of the target's, so that a map `d2t` tells which."""
    return bool(config["draft_vocab_size"] != config["vocab_size"])


class Format:
    """The directory of a family of such heads: those functions of `models.drafts.Family` that all of them share."""

    def __init__(
        self, family: str, architectures: tuple[str, ...], head: Callable[[dict[str, Any], Tensor], Eagle3]
    ) -> None:
        self._family, self._architectures, self._head = family, architectures, head

    def create(self, params: HeadParams, target_dir: Path, token_counts: np.ndarray) -> Eagle3:
        """Make a head that starts from the target's last layer.

        Its hidden-state half of the attention and its MLP are the target's, the embedding half is zero, and `fc` passes
        the deepest tapped layer through, so an untrained head already drafts better than chance.

        Args:
            params: the head's shape.
            target_dir: the target's directory (Llama layout).
            token_counts: [V] how often each target token occurs in the traffic.

        Raises:
            ValueError: the target is not of the Llama layout, or `params` don't fit it.
        """
        source = AutoConfig.from_pretrained(target_dir)
        require_llama_layout(source.model_type, self._family)
        if not 1 <= params.vocab_size <= source.vocab_size:
            raise ValueError(
                f"draft vocab_size must be 1 to {source.vocab_size}, the target's; got {params.vocab_size}"
            )
        layers = params.aux_layers or _default_layers(source.num_hidden_layers)
        if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= source.num_hidden_layers:
            raise ValueError(f"aux_layers must ascend within 0 to {source.num_hidden_layers}; got {list(layers)}")
        config = self.config(source, params.vocab_size, layers, describe(target_dir)) | params.more(source.vocab_size)
        head = self._head(config, read_tensor(target_dir, "model.embed_tokens.weight").float())
        _start_from_last_layer(head, target_dir, source.num_hidden_layers - 1)
        _set_vocabulary(head, target_dir, choose_vocabulary(token_counts, params.vocab_size))
        return head

    def renew(self, draft: Eagle3, target_dir: Path, token_counts: np.ndarray) -> Eagle3:
        """Let the draft vocabulary follow the traffic within its size; new tokens' rows start from the target's."""
        wanted = choose_vocabulary(token_counts, len(draft.d2t))
        known = {int(token): row for row, token in enumerate(draft.vocabulary)}
        before = draft.lm_head.weight.detach().clone()
        _set_vocabulary(draft, target_dir, wanted)
        with torch.no_grad():
            for row, token in enumerate(wanted.tolist()):
                if token in known:
                    draft.lm_head.weight[row] = before[known[token]]
        return draft

    def save(self, draft: Eagle3, directory: Path) -> None:
        """Write config.json and bfloat16 safetensors into `directory`, as the engine loads them."""
        tensors = {
            name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
            for name, tensor in draft.state_dict().items()
        }
        save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
        write_config(draft.config, self._family, directory)

    def load(self, directory: Path, target_dir: Path) -> Eagle3:
        """Read a head back, in float32, with the target's embedding beside it.

        Raises:
            ValueError: as `check`.
        """
        self.check(directory, like=None, target=describe(target_dir))
        config = read_config(directory, self._family, self._architectures)
        head = self._head(config, read_tensor(target_dir, "model.embed_tokens.weight").float())
        head.load_state_dict(load_file(directory / WEIGHTS))
        return head.float()

    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """See `models.drafts.Family`; a vocabulary map that points outside the target's is refused as well."""
        config = read_config(directory, self._family, self._architectures)
        if config["hidden_size"] != target.hidden_size:
            raise ValueError(
                f"draft {directory.name} has hidden_size {config['hidden_size']}, the target has {target.hidden_size}"
            )
        served = None if like is None else read_config(like, self._family, self._architectures)
        check_config(config, directory, served, target)
        self.require_fit(read_stored(directory), config)

    def expected_shapes(self, config: dict[str, Any]) -> Shapes:
        """Return shape and dtype of every tensor of a checkpoint."""
        with torch.device("meta"):
            head = self._head(config, torch.empty(1, 1))
        dtype = getattr(torch, config.get("dtype", "bfloat16"))
        return {
            name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for name, t in head.state_dict().items()
        }

    def require_fit(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Raise ValueError unless tensors are a head's, its vocabulary an ascending part of the target's."""
        require_tensors(tensors, self.expected_shapes(config))
        if "d2t" in tensors:
            require_vocabulary("d2t", tensors["d2t"] + torch.arange(len(tensors["d2t"])), config["vocab_size"])

    def config(self, source: Any, vocab_size: int, layers: tuple[int, ...], card: TargetCard) -> dict[str, Any]:
        """Return the config.json of a head with a layer like those of `source`, a transformers configuration."""
        config = layer_config(source) | {
            "architectures": list(self._architectures),
            "draft_vocab_size": vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(layers),
            "redraft": made_for(card),
        }
        if len(layers) != 3:
            config["num_aux_hidden_states"] = len(layers)
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        return config


def _default_layers(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


def _start_from_last_layer(head: Eagle3, target_dir: Path, last: int) -> None:
    hidden = head.config["hidden_size"]
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        for name, parameter in head.midlayer.named_parameters():
            if name == "hidden_norm.weight":
                parameter.copy_(read_tensor(target_dir, f"model.layers.{last}.input_layernorm.weight"))
            elif name == "input_layernorm.weight":
                parameter.fill_(1.0)
            elif name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"):
                parameter.zero_()
                parameter[:, hidden:] = read_tensor(target_dir, f"model.layers.{last}.{name}")
            else:
                parameter.copy_(read_tensor(target_dir, f"model.layers.{last}.{name}"))
        head.norm.weight.copy_(read_tensor(target_dir, "model.norm.weight"))


def _set_vocabulary(head: Eagle3, target_dir: Path, vocabulary: Tensor) -> None:
    with torch.no_grad():
        head.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        head.lm_head.weight.copy_(output_embedding(target_dir)[vocabulary])
