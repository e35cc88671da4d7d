"""EAGLE-3: one decoder layer that drafts from the target's own hidden states, made, kept and checked.

The module itself is in `head`, what others publish in `layouts`. The draft vocabulary is a subset of the target's.
`d2t[i]` is the target's id of draft token i, minus i; a head that can say every token has none, because the engine
makes no room for it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig

from models.checkpoint import output_embedding, read_stored, read_tensor, tensor_names
from models.draft_files import (
    Shapes,
    check_config,
    check_made_for,
    fused,
    made_for,
    read_config,
    read_json,
    require_llama_layout,
    require_tensors,
    require_vocabulary,
    write_config,
)
from models.drafts import EngineWeights
from models.drafts.eagle3.head import Eagle3, is_subset
from models.drafts.eagle3.layouts import LAYER_NAMES, is_published, read_published
from models.features import layer_config
from models.layers.vocabulary import choose_vocabulary
from models.params import BaseParams
from models.targets import TargetCard, describe

PAPER = "arXiv:2503.01840"
TRAINED = True
SERVED = True
FAMILY = "eagle3"
WEIGHTS = "model.safetensors"
ARCHITECTURES = ("LlamaForCausalLMEagle3",)


class Params(BaseParams):
    """Shape of a new head.

    Attributes:
        vocab_size: D, at most the target's.
        aux_layers: which residual streams are read, counted as layers done; by default a third, two thirds and all of
            them.
    """

    name: Literal["eagle3"] = "eagle3"
    vocab_size: int = 4096
    aux_layers: tuple[int, ...] | None = None


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> Eagle3:
    """Make a head that starts from the target's last layer.

    Its hidden-state half of the attention and its MLP are the target's, the embedding half is zero, and `fc` passes the
    deepest tapped layer through, so an untrained head already drafts better than chance.

    Args:
        params: the head's shape.
        target_dir: the target's directory (Llama layout).
        token_counts: [V] how often each target token occurs in the traffic.

    Raises:
        ValueError: the target is not of the Llama layout, or `params` don't fit it.
    """
    source = AutoConfig.from_pretrained(target_dir)
    require_llama_layout(source.model_type, FAMILY)
    if not 1 <= params.vocab_size <= source.vocab_size:
        raise ValueError(f"draft vocab_size must be 1 to {source.vocab_size}, the target's; got {params.vocab_size}")
    layers = params.aux_layers or _default_layers(source.num_hidden_layers)
    if list(layers) != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= source.num_hidden_layers:
        raise ValueError(f"aux_layers must ascend within 0 to {source.num_hidden_layers}; got {list(layers)}")
    card = describe(target_dir)
    config = _config(source, params.vocab_size, layers, card)
    head = Eagle3(config, read_tensor(target_dir, "model.embed_tokens.weight").float())
    _start_from_last_layer(head, target_dir, source.num_hidden_layers - 1)
    _set_vocabulary(head, target_dir, choose_vocabulary(token_counts, params.vocab_size))
    return head


def renew(draft: Eagle3, target_dir: Path, token_counts: np.ndarray) -> Eagle3:
    """Let the draft vocabulary follow the traffic within its size; new tokens' rows start from the target's head."""
    wanted = choose_vocabulary(token_counts, len(draft.d2t))
    known = {int(token): row for row, token in enumerate(draft.vocabulary)}
    before = draft.lm_head.weight.detach().clone()
    _set_vocabulary(draft, target_dir, wanted)
    with torch.no_grad():
        for row, token in enumerate(wanted.tolist()):
            if token in known:
                draft.lm_head.weight[row] = before[known[token]]
    return draft


def save(draft: Eagle3, directory: Path) -> None:
    """Write config.json and bfloat16 safetensors into `directory`, as the engine loads them."""
    tensors = {
        name: tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else tensor.dtype).contiguous().cpu()
        for name, tensor in draft.state_dict().items()
    }
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    write_config(draft.config, FAMILY, directory)


def load(directory: Path, target_dir: Path) -> Eagle3:
    """Read a head back, in float32, with the target's embedding beside it.

    Raises:
        ValueError: as `check`.
    """
    check(directory, like=None, target=describe(target_dir))
    config = read_config(directory, FAMILY, ARCHITECTURES)
    head = Eagle3(config, read_tensor(target_dir, "model.embed_tokens.weight").float())
    head.load_state_dict(load_file(directory / WEIGHTS))
    return head.float()


def check(directory: Path, like: Path | None, target: TargetCard) -> None:
    """See `models.drafts.Family`; a vocabulary map that points outside the target's is refused as well."""
    config = read_config(directory, FAMILY, ARCHITECTURES)
    if config["hidden_size"] != target.hidden_size:
        raise ValueError(
            f"draft {directory.name} has hidden_size {config['hidden_size']}, the target has {target.hidden_size}"
        )
    check_config(config, directory, None if like is None else read_config(like, FAMILY, ARCHITECTURES), target)
    _require_fit(read_stored(directory), config)


def publishes(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a head in a layout of `layouts`."""
    return is_published(config)


def adopt(directory: Path, target_dir: Path) -> Eagle3:
    """Take a head that somebody else trained, in a layout of `layouts`.

    Args:
        directory: config.json and safetensors files; a tokenizer.json beside them must have the target's tokens.
        target_dir: the target that it is to draft for.

    Raises:
        ValueError: the head was made for another target as far as its files tell, is of a shape that is not supported,
            or a tensor is missing, extra, of another shape or not finite; names what does not fit.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    if not list(directory.glob("*.safetensors")) and (pickled := sorted(directory.glob("*.bin"))):
        raise ValueError(f"{pickled[0]} is a pickle, which could run code; wanted safetensors files")
    published = read_json(directory / "config.json")
    target, source = describe(target_dir), AutoConfig.from_pretrained(target_dir)
    check_made_for(published, directory, target)
    head = read_published(published, read_stored(directory), target.num_layers)
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if (got := getattr(head.layer, key)) != wanted:
            raise ValueError(f"the head has {key} {got}, the target has {wanted}")
    _require_same_tokens(directory, target_dir)
    embedding = read_tensor(target_dir, "model.embed_tokens.weight")
    own = head.tensors.pop("embed_tokens.weight", None)
    if own is not None and not torch.equal(own, embedding.to(own.dtype)):
        raise ValueError(
            "tensor embed_tokens.weight is not the target's; a head with an embedding of its own is not supported"
        )
    # Of no meaning for a head: with the target's, one of the same shape can be swapped in for it.
    for key in ("bos_token_id", "eos_token_id", "max_position_embeddings"):
        setattr(head.layer, key, getattr(source, key))
    config = _config(head.layer, head.draft_vocab_size, head.taps, target)
    if head.norm_before_residual:
        config["norm_before_residual"] = True
    if not is_subset(config) and not head.tensors.get("d2t", torch.zeros(1)).any():
        head.tensors.pop("d2t", None)
    _require_fit(head.tensors, config)
    adopted = Eagle3(config, embedding.float())
    adopted.load_state_dict(head.tensors)
    return adopted


def vllm_config(directory: Path) -> dict[str, Any]:
    """Return what vLLM's speculative_config says of this draft."""
    return {"method": "eagle3", "model": str(directory)}


def vllm_weights(directory: Path) -> EngineWeights:
    """Return the file, with vLLM's names for its tensors."""
    file = directory / WEIGHTS
    return EngineWeights(file, fused({_engine_name(name): name for name in tensor_names(file)}))


def expected_shapes(config: dict[str, Any]) -> Shapes:
    """Return shape and dtype of every tensor of a checkpoint."""
    with torch.device("meta"):
        head = Eagle3(config, torch.empty(1, 1))
    dtype = getattr(torch, config.get("dtype", "bfloat16"))
    return {
        name: (tuple(t.shape), dtype if t.is_floating_point() else t.dtype) for name, t in head.state_dict().items()
    }


def _engine_name(tensor: str) -> str:
    """Return the name that a tensor would have in vLLM if none were stacked."""
    if tensor == "d2t":
        return "draft_id_to_target_id"
    if tensor.startswith("lm_head."):
        return tensor
    native, numbered = LAYER_NAMES
    return f"model.{tensor.replace(native, numbered)}"


def _require_fit(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Raise ValueError unless tensors are a head's, its vocabulary an ascending part of the target's."""
    require_tensors(tensors, expected_shapes(config))
    if "d2t" in tensors:
        require_vocabulary("d2t", tensors["d2t"] + torch.arange(len(tensors["d2t"])), config["vocab_size"])


def _require_same_tokens(directory: Path, target_dir: Path) -> None:
    """Raise ValueError if a head brings a tokenizer that is not the target's."""
    file, known = directory / "tokenizer.json", target_dir / "tokenizer.json"
    if not file.is_file() or not known.is_file():
        return
    own, wanted = (Tokenizer.from_file(str(path)).get_vocab() for path in (file, known))
    if differing := sorted(token for token in own.keys() | wanted.keys() if own.get(token) != wanted.get(token)):
        raise ValueError(
            f"the head's tokenizer is not the target's: {len(differing)} tokens differ, such as {differing[0]!r}"
        )


def _default_layers(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3), num_layers}))


def _config(source: Any, vocab_size: int, layers: tuple[int, ...], card: TargetCard) -> dict[str, Any]:
    config = layer_config(source) | {
        "architectures": list(ARCHITECTURES),
        "draft_vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "redraft": made_for(card),
    }
    if len(layers) != 3:
        config["num_aux_hidden_states"] = len(layers)
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
    return config


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
