"""A language model of its own: the target without most of its layers, distilled to say what the target would.

The kept layers are spread evenly from the first to the last, so that the embedding and the output matrix still meet the
layers they were trained with (DistilBERT starts the same way). Both matrices are the target's and stay as they are: at
small sizes they are most of the weights, and a draft that shares them starts from something. Unlike a head on the
target's states it reads nothing of the target, so a drafted token that was right is no different from one that was
read: one unroll trains all of them.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from models.checkpoint import read_tensors, tensor_names
from models.draft_files import Shapes, check_config, fused, made_for, read_config, require_tensors, write_config
from models.drafts import Draft, EngineWeights, KeepRows, Rows, Unrolled, step_by_step
from models.layers.decoder import Decoder
from models.layers.reshape import spread_layers, take_layers
from models.loading import load_floats
from models.params import BaseParams
from models.reading import Reader
from models.targets import TargetCard, describe

PAPER = "arXiv:2302.01318; arXiv:1910.01108, section 3 (initialisation)"
FAMILY = "lm"
WEIGHTS = "model.safetensors"
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TRAINED = True
SERVED = True


class Params(BaseParams):
    """Shape of a new draft.

    Attributes:
        num_layers: how many of the target's layers it keeps.
    """

    name: Literal["lm"] = "lm"
    num_layers: int = 3


class Lm(Draft):
    """The model; parameters carry the names of the checkpoint."""

    max_unroll = 1
    expands = True

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.lm_head = model.model, model.lm_head
        self.config = model.config
        for matrix in (self.model.embed_tokens, self.lm_head):
            matrix.requires_grad_(False)
        self._decoder: tuple[tuple[int, ...], Decoder] | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Nothing of the target is read."""
        return ()

    @property
    def vocabulary(self) -> Tensor:
        """All of the target's."""
        return torch.arange(self.config.vocab_size, device=self.lm_head.weight.device)

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`."""
        # Right padding needs no mask: no token attends to a later one.
        states = self.model(input_ids=rows.token_ids, use_cache=False).last_hidden_state

        def say(step: int, running: Tensor) -> tuple[Tensor, Tensor]:
            hidden = states[rows.sequence[running], rows.index[running] + 1 + step]
            return hidden, self.lm_head(hidden)

        return step_by_step(torch.arange(len(rows.index), device=rows.index.device), num_steps, keep, say)

    def drafter(self, max_len: int) -> "_Drafter":
        """See `models.drafts.Draft`."""
        return _Drafter(self, max_len)

    def decoder(self) -> Decoder:
        """Return the forward pass that drafts, of the weights as they are now."""
        versions = tuple(parameter._version for parameter in self.parameters())
        if self._decoder is None or self._decoder[0] != versions:
            weight = self.lm_head.weight
            self._decoder = versions, Decoder(self.config, self.state_dict(), weight.dtype, str(weight.device))
        return self._decoder[1]


class _Drafter(Reader):
    """See `models.reading.Reader`."""

    draft: Lm

    def decoder(self) -> Decoder:
        """See the base."""
        return self.draft.decoder()


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Lm:
    """Take layers out of the target.

    Args:
        params: how many stay.
        target_dir: the target's directory (Llama layout).
        token_counts: not read; the vocabulary is the target's.

    Raises:
        ValueError: the target is of another layout, or has too few layers.
    """
    config = AutoConfig.from_pretrained(target_dir)
    if config.architectures[0] not in ARCHITECTURES:
        raise ValueError(f"lm takes targets of {', '.join(ARCHITECTURES)}; got {config.architectures[0]}")
    if not 1 <= params.num_layers < config.num_hidden_layers:
        raise ValueError(
            f"num_layers must be 1 to {config.num_hidden_layers - 1}, less than the target's; got {params.num_layers}"
        )
    model = take_layers(load_floats(target_dir), spread_layers(config.num_hidden_layers, params.num_layers))
    model.config.redraft = made_for(describe(target_dir))
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
    """Read a draft back, in float32.

    Raises:
        ValueError: as `check`.
    """
    check(directory, like=None, target=describe(target_dir))
    return Lm(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32))


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """See `models.drafts.Family`."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    check_config(config, directory, None if like is None else read_config(like, FAMILY, ARCHITECTURES), target)
    require_tensors(read_tensors(directory), expected_shapes(AutoConfig.from_pretrained(directory)))


def vllm_config(directory: Path) -> dict[str, Any]:
    """Return what vLLM's speculative_config says of this draft."""
    return {"method": "draft_model", "model": str(directory)}


def vllm_weights(directory: Path) -> EngineWeights:
    """Return the file, with vLLM's names for its tensors."""
    return EngineWeights(directory / WEIGHTS, fused({name: name for name in tensor_names(directory / WEIGHTS)}))


def expected_shapes(config: Any) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {n: (tuple(t.shape), torch.bfloat16) for n, t in model.state_dict().items() if n not in tied}
