"""What the tests of regimes share: a small model, easy documents, and one short training."""

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.core.learning import training
from models.core.learning.counting import counted
from models.params import BaseParams, TrainingParams
from models.regimes import Regime
from models.targets import random, target_config

TRAINING = TrainingParams(num_epochs=4, batch_tokens=128, learning_rate=3e-3, checkpoint_s=1e-9)
SEED = 3


def load(directory: Path, num_layers: int | None = None) -> PreTrainedModel:
    """Read the target, or draw one of another depth and its other shapes."""
    if num_layers is None:
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = target_config(directory)
    config.num_hidden_layers = num_layers
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def built(directory: Path, **shape: int) -> PreTrainedModel:
    random.build(random.Params(**shape), directory)
    return load(directory)


def documents(count: int = 20) -> list[list[int]]:
    """Sequences that count in steps of three through 60 tokens, of different lengths."""
    return [[3 + (start + 3 * place) % 60 for place in range(20 - start % 4)] for start in range(count)]


def train(
    model: PreTrainedModel, methods: Sequence[BaseParams], work_dir: Path | None = None, num_epochs: int = 4
) -> training.Trained:
    params = TRAINING.model_copy(update={"num_epochs": num_epochs})
    return training.train_by_name(model, documents(), params, methods, SEED, work_dir)


def batch() -> dict[str, Tensor]:
    """Three documents as the model takes them, to be learnt."""
    token_ids = torch.tensor([document[:16] for document in documents(3)])
    return {"input_ids": token_ids, "labels": token_ids}


def gradients(model: PreTrainedModel, **inputs: Tensor) -> dict[str, Tensor]:
    """Return what one backward pass in training leaves in each parameter that has a gradient."""
    model.train()
    model.zero_grad()
    model(**(inputs or batch()), use_cache=False).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def start(method: ModuleType, model: PreTrainedModel, **settings: object) -> Regime:
    """Hang a method on the model."""
    regime: Regime = method.Hooks(method.Params(**settings), torch.Generator())
    regime.start(model, 1)
    return regime


def held(model: PreTrainedModel, **inputs: Tensor) -> int:
    """Return the peak of activations, in bytes."""
    with counted(model) as cost:
        gradients(model, **inputs)
    return cost.peak_activation_bytes
