"""Parameter-efficient finetuning: few parameters are trained, the rest of the model stays as it is.

Letters: B sequences, L tokens of a sequence, E width, r rank.

A method's module has

- `insert(model, params, rng)`: puts into a plain model what is trained, in place, and lets it need a gradient; all of
  the model's own parameters need none when it is called;
- `LEARNING_RATE`: where to start a search, because between methods it differs by an order of magnitude;
- `fold(model)`, where the result is a plain model: takes the method's modules out again, in place, so that the logits
  stay equal; or `ELSEWHERE`, a line that says why there is none, and where the method's place is.

`models.core.learning.training.train` trains what needs a gradient. `save` keeps just that, in a small file that is
bound to its base by a hash of the base's weights and loads onto no other.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints.loading import read_tensors
from models.params import BaseParams

KEEPS: tuple[str, ...] = ("frozen weights",)  # of every method
_CARD, _WEIGHTS = "adapter.json", "adapter.safetensors"


class Adapted(NamedTuple):
    model: PreTrainedModel  # trained as any other; its saved directory is no plain checkpoint
    params: BaseParams  # the method
    base_sha256: str  # of the weights that it was attached to
    num_base: int  # parameters of the base

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    @property
    def trained_share(self) -> float:
        return sum(parameter.numel() for parameter in self.trained.values()) / self.num_base


def attach(model: PreTrainedModel, params: BaseParams, rng: torch.Generator) -> Adapted:
    """Put an adapter into a plain model in float32, in place; its logits are the base's, or those of it quantized.
    ValueError if the model is not plain, such as one that has an adapter, or the method can't be put into it."""
    _require_plain(model)
    base_sha256, num_base = weights_sha256(model), model.num_parameters()
    model.requires_grad_(False)
    catalog.load("adapters", params.name).insert(model, params, rng)
    return Adapted(model, params, base_sha256, num_base)


def save(adapted: Adapted, directory: Path) -> None:
    """Write what is trained, and what it belongs to, into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in adapted.trained.items()}
    save_file(tensors, directory / _WEIGHTS)
    card = {"params": adapted.params.model_dump(mode="json"), "base_sha256": adapted.base_sha256}
    (directory / _CARD).write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")


def load(model: PreTrainedModel, directory: Path) -> Adapted:
    """Put a saved adapter into its base, in place; in which float format that was loaded makes no difference.

    ValueError if a file can't be read, the model is another one, or a tensor is missing, extra, of another shape or not
    finite. `model` is unchanged if it is another one.
    """
    card = _read_card(directory)
    if (found := weights_sha256(model)) != card["base_sha256"]:
        raise ValueError(
            f"adapter {directory.name} was made for a base of weights {card['base_sha256'][:12]}…, "
            f"this one's are {found[:12]}…"
        )
    tensors = read_tensors(directory)
    adapted = attach(model, catalog.parse("adapters", card["params"]), torch.Generator())
    trained = adapted.trained
    if odd := sorted(trained.keys() ^ tensors.keys()):
        raise ValueError(f"adapter {directory.name}: tensor {odd[0]} is {_side(odd[0] in trained)}")
    with torch.no_grad():
        for name, parameter in trained.items():
            if tensors[name].shape != parameter.shape or not bool(torch.isfinite(tensors[name]).all()):
                raise ValueError(
                    f"adapter {directory.name}: tensor {name} is {list(tensors[name].shape)}; "
                    f"wanted {list(parameter.shape)}, all finite"
                )
            parameter.copy_(tensors[name])
    return adapted


def merge(adapted: Adapted) -> PreTrainedModel:
    """Make a plain model of it, in place, of equal logits up to rounding; ValueError if the method's result is no plain
    model."""
    module = catalog.load("adapters", adapted.params.name)
    if not hasattr(module, "fold"):
        raise ValueError(
            f'adapters of method "{adapted.params.name}" can\'t be merged: no plain model computes the same'
        )
    module.fold(adapted.model)
    _require_plain(adapted.model)
    adapted.model.requires_grad_(True)
    return adapted.model


def weights_sha256(model: PreTrainedModel) -> str:
    """Hash a model's weights by name and value, the same for bfloat16 weights and their copies in float32."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {list(parameter.shape)}\n".encode())
        digest.update(parameter.detach().float().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _require_plain(model: PreTrainedModel) -> None:
    """Raise ValueError naming a weight that a model of this class and config doesn't have, or lacks."""
    with torch.device("meta"):
        plain = type(model)(model.config)
    if odd := sorted(plain.state_dict().keys() ^ model.state_dict().keys()):
        raise ValueError(
            f"not a plain {type(model).__name__}: {odd[0]} is {_side(odd[0] not in model.state_dict())}; "
            "an adapter goes onto a model that has none"
        )


def _side(lacking: bool) -> str:
    return "missing" if lacking else "there and not wanted"


def _read_card(directory: Path) -> dict[str, Any]:
    file = directory / _CARD
    try:
        card = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"adapter {directory.name}: {_CARD} can't be read: {error}") from error
    if not isinstance(card, dict) or card.keys() != {"params", "base_sha256"}:
        raise ValueError(f"adapter {directory.name}: {_CARD} must hold params and base_sha256")
    return card
