"""EAGLE: one decoder layer that goes on with the features that the target's output matrix reads.

    f̂(t+1) = layer(W [E(x(t+1)); f(t)] ≤ t),   q = softmax(W_out f̂)

The feature of a token is the target's last hidden state, normed; the token that was drawn after it settles what the
feature alone leaves open. The layer has no norm before its attention. E and W_out are the target's; of W_out the rows
of the commonest tokens, which the paper has all of and which at small sizes are most of what a pass multiplies. They
are not learnt, so which ones they are can follow the traffic. Training is of one step, with the target's features:
smooth L1 to the next feature and a tenth of the cross-entropy to its distribution; uniform noise on the features stands
for the errors that further steps start from.

A draft of the target's whole vocabulary is in the layout of vLLM's EAGLE: stock vLLM 0.32 drafted with one on a CPU,
and accepted as much of it as the reference engine.
"""

from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
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
from models.drafts import Procedure
from models.features import FeatureDraft, decoder_layer, layer_config, linear
from models.layers.vocabulary import choose_vocabulary
from models.losses import feature_regression
from models.params import BaseParams
from models.targets import TargetCard, describe

PAPER = "arXiv:2401.15077"
FAMILY = "eagle"
WEIGHTS = "model.safetensors"
ARCHITECTURES = ("EagleLlamaForCausalLM",)
TRAINED = True
SERVED = False
# Read in vLLM 0.32: model_executor/models/llama_eagle.py. The tensors have its names.
UNSERVED = "vLLM's EAGLE drafts say every token of the target, with its whole output matrix"


class Params(BaseParams):
    """What is a new draft's own.

    Attributes:
        vocab_size: D, at most the target's.
        noise: features are off by up to this in training, each entry by itself.
    """

    name: Literal["eagle"] = "eagle"
    vocab_size: int = Field(4096, ge=1)
    noise: float = Field(0.1, ge=0)


class Eagle(FeatureDraft):
    """The layer; parameters carry the names of the checkpoint. Norm and output matrix are borrowed as well."""

    max_unroll = 1  # in training every step reads the target's features
    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=1.0)
    target_norm: Tensor
    output: Tensor
    token_map: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        """Make the modules, without weights; see `borrow`.

        Args:
            config: as in config.json.
        """
        super().__init__(config, torch.empty(0))
        hidden, size = config["hidden_size"], config["draft_vocab_size"]
        self.num_target_layers = 0
        self.fc = linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([decoder_layer(config, hidden, ())])
        self.register_buffer("target_norm", torch.ones(hidden), persistent=False)
        self.register_buffer("output", torch.empty(0), persistent=False)
        self.register_buffer("token_map", torch.arange(size), persistent=size < config["vocab_size"])

    def borrow(self, target_dir: Path) -> Self:
        """Take over what is the target's and never trained or saved, for the vocabulary as it is; return the draft."""
        self.num_target_layers = AutoConfig.from_pretrained(target_dir).num_hidden_layers
        self.embedding = read_tensor(target_dir, "model.embed_tokens.weight").float()
        self.target_norm = read_tensor(target_dir, "model.norm.weight").float()
        self.output = output_embedding(target_dir)[self.token_map]
        return self

    @property
    def vocabulary(self) -> Tensor:
        """[D] target ids, ascending."""
        return self.token_map

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's last residual stream."""
        return (self.num_target_layers,)

    @property
    def layer(self) -> Any:
        """See the base, as are the next four."""
        return self.layers[0]

    def noise(self, state: Tensor, rng: torch.Generator) -> Tensor:
        """Add what is drawn from U(−noise, noise)."""
        drawn = torch.rand(state.shape, generator=rng, device=state.device, dtype=state.dtype)
        noisy: Tensor = state + self.config["feature_noise"] * (2 * drawn - 1)
        return noisy

    def combine(self, hidden: Tensor) -> Tensor:
        """The last residual stream, normed: what the target's output matrix multiplies."""
        if hidden.shape[-1] != len(self.target_norm):
            raise ValueError(
                f"Eagle reads the target's last hidden state, {len(self.target_norm)} wide; got states of width "
                f"{hidden.shape[-1]}"
            )
        return functional.rms_norm(hidden, self.target_norm.shape, self.target_norm, self.eps)

    def join(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """One product of the embedding and the feature; J = H."""
        joined: Tensor = self.fc(torch.cat([functional.embedding(token_ids, self.embedding), state], dim=-1))
        return joined

    def residual(self, state: Tensor, joined: Tensor) -> Tensor:
        """The product."""
        return joined

    def say(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The target's output matrix, of the draft's tokens."""
        return state, functional.linear(state, self.output)


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Eagle:
    """Make a draft whose layer is the target's last, and to which the embedding says nothing yet.

    Args:
        params: what it is trained with.
        target_dir: the target's directory (Llama layout).
        token_counts: [V] how often each target token occurs in the traffic.

    Raises:
        ValueError: the target is of another layout, or has fewer tokens than the draft.
    """
    source = AutoConfig.from_pretrained(target_dir)
    require_llama_layout(source.model_type, FAMILY)
    if params.vocab_size > source.vocab_size:
        raise ValueError(f"draft vocab_size must be 1 to {source.vocab_size}, the target's; got {params.vocab_size}")
    hidden, last = source.hidden_size, source.num_hidden_layers - 1
    config = layer_config(source) | {
        "architectures": list(ARCHITECTURES),
        "draft_vocab_size": params.vocab_size,
        "feature_noise": params.noise,
        "redraft": made_for(describe(target_dir)),
    }
    draft = renew(Eagle(config), target_dir, token_counts)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=-1))
        for name, parameter in draft.layer.named_parameters():
            parameter.copy_(read_tensor(target_dir, f"model.layers.{last}.{name}"))
    return draft


def renew(draft: Eagle, target_dir: Path, token_counts: np.ndarray) -> Eagle:
    """Let the draft vocabulary follow the traffic within its size."""
    draft.token_map = choose_vocabulary(token_counts, len(draft.token_map)).to(draft.token_map.device)
    return draft.borrow(target_dir)


def save(draft: Eagle, directory: Path) -> None:
    """Write config.json and bfloat16 safetensors into `directory`, in vLLM's layout."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
        for name, tensor in draft.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_config(draft.config, FAMILY, directory)


def load(directory: Path, target_dir: Path) -> Eagle:
    """Read a draft back, in float32; ValueError as `check`."""
    check(directory, like=None, target=describe(target_dir))
    draft = Eagle(read_config(directory, FAMILY, ARCHITECTURES))
    draft.load_state_dict(load_file(directory / WEIGHTS))
    return draft.float().borrow(target_dir)


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """See `models.drafts.Family`."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    if config.get("hidden_size") != target.hidden_size:
        raise ValueError(
            f"draft {directory.name} has hidden_size {config.get('hidden_size')}, the target has {target.hidden_size}"
        )
    check_config(config, directory, None if like is None else read_config(like, FAMILY, ARCHITECTURES), target)
    tensors = read_stored(directory)
    require_tensors(tensors, expected_shapes(config))
    if "token_map" in tensors:
        require_vocabulary("token_map", tensors["token_map"], config["vocab_size"])


def vllm_config(directory: Path) -> dict[str, Any]:
    """Raise a ValueError: nothing here has served it yet."""
    raise ValueError(f'vLLM can\'t draft with family {FAMILY}; engine "torch" can')


def vllm_weights(directory: Path) -> None:
    """Return None: nothing is swapped."""


def expected_shapes(config: dict[str, Any]) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        draft = Eagle(config)
    return {
        name: (tuple(tensor.shape), torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in draft.state_dict().items()
    }
