"""EAGLE: one decoder layer that goes on with the features that the target's output matrix reads.

    f̂(t+1) = layer(W [E(x(t+1)); f(t)] ≤ t),   q = softmax(W_out f̂)

The feature of a token is the target's last hidden state, normed; the token that was drawn after it settles what the
feature alone leaves open. The layer has no norm before its attention. E and W_out are the target's, whole, so the draft
can say every token. Training is of one step, with the target's features: smooth L1 to the next feature and a tenth of
the cross-entropy to its distribution; uniform noise on the features stands for the errors that further steps start
from.
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
    write_config,
)
from models.drafts import Procedure
from models.features import FeatureDraft, decoder_layer, layer_config, linear
from models.losses import feature_regression
from models.params import BaseParams
from models.targets import TargetCard, describe

PAPER = "arXiv:2401.15077"
FAMILY = "eagle"
WEIGHTS = "model.safetensors"
ARCHITECTURES = ("EagleLlamaForCausalLM",)
TRAINED = True
SERVED = False


class Params(BaseParams):
    """What a new draft is trained with beside the loop's settings.

    Attributes:
        noise: features are off by up to this in training, each entry by itself.
    """

    name: Literal["eagle"] = "eagle"
    noise: float = Field(0.1, ge=0)


class Eagle(FeatureDraft):
    """The layer; parameters carry the names of the checkpoint. Norm and output matrix are borrowed as well."""

    max_unroll = 1  # in training every step reads the target's features
    procedure = Procedure(loss=feature_regression.Params(), follow="all", step_decay=1.0)
    target_norm: Tensor
    output: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        """Make the modules, without weights; see `borrow`.

        Args:
            config: as in config.json.
        """
        super().__init__(config, torch.empty(0))
        hidden = config["hidden_size"]
        self.num_target_layers = 0
        self.fc = linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([decoder_layer(config, hidden, ())])
        self.register_buffer("target_norm", torch.ones(hidden), persistent=False)
        self.register_buffer("output", torch.empty(0), persistent=False)

    def borrow(self, target_dir: Path) -> Self:
        """Take over what is the target's and never trained or saved; return the draft."""
        self.num_target_layers = AutoConfig.from_pretrained(target_dir).num_hidden_layers
        self.embedding = read_tensor(target_dir, "model.embed_tokens.weight").float()
        self.target_norm = read_tensor(target_dir, "model.norm.weight").float()
        self.output = output_embedding(target_dir)
        return self

    @property
    def vocabulary(self) -> Tensor:
        """All of the target's."""
        return torch.arange(len(self.output), device=self.output.device)

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
        """The target's output matrix."""
        return state, functional.linear(state, self.output)


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Eagle:
    """Make a draft whose layer is the target's last, and to which the embedding says nothing yet.

    Args:
        params: what it is trained with.
        target_dir: the target's directory (Llama layout).
        token_counts: not read; the vocabulary is the target's.

    Raises:
        ValueError: the target is of another layout.
    """
    source = AutoConfig.from_pretrained(target_dir)
    require_llama_layout(source.model_type, FAMILY)
    hidden, last = source.hidden_size, source.num_hidden_layers - 1
    config = layer_config(source) | {
        "architectures": list(ARCHITECTURES),
        "feature_noise": params.noise,
        "redraft": made_for(describe(target_dir)),
    }
    draft = Eagle(config).borrow(target_dir)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=-1))
        for name, parameter in draft.layer.named_parameters():
            parameter.copy_(read_tensor(target_dir, f"model.layers.{last}.{name}"))
    return draft


def renew(draft: Eagle, target_dir: Path, token_counts: np.ndarray) -> Eagle:
    """Return the draft as it is: it can say every token already."""
    return draft


def save(draft: Eagle, directory: Path) -> None:
    """Write config.json and bfloat16 safetensors into `directory`, in vLLM's layout."""
    tensors = {name: t.detach().to(torch.bfloat16).contiguous().cpu() for name, t in draft.state_dict().items()}
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
    require_tensors(read_stored(directory), expected_shapes(config))


def vllm_config(directory: Path) -> dict[str, Any]:
    """Raise a ValueError: nothing here has served it yet."""
    raise ValueError(f'vLLM can\'t draft with family {FAMILY}; engine "torch" can')


def vllm_weights(directory: Path) -> None:
    """Return None: nothing is swapped."""


def expected_shapes(config: dict[str, Any]) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        draft = Eagle(config)
    return {name: (tuple(tensor.shape), torch.bfloat16) for name, tensor in draft.state_dict().items()}
