"""A small head that says how likely something is from a few features, and how it is fit.

Features are standardised as they were when it was fit, go through residual layers x + SiLU(W x + b), and a last one
makes them a logit. A wrong yes may cost more than a wrong no, or the other way round, so labels are weighed:

    −Σ [ y log σ + w (1 − y) log (1 − σ) ] / Σ [ y + w (1 − y) ]

with σ what it says and w the weight of a no, so that what it says moves too: where all features are alike, the least is
at ȳ / (ȳ + w (1 − ȳ)). Its features do not change while it learns, so all of them are read in every step.

Letters: N examples, F features.
"""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

NUM_STEPS, LEARNING_RATE = 300, 0.02


class BinaryHead(nn.Module):
    """[…, F] → […] logits."""

    mean: Tensor
    scale: Tensor

    def __init__(self, num_features: int, num_layers: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("scale", torch.ones(num_features))
        self.layers = nn.ModuleList(nn.Linear(num_features, num_features) for _ in range(num_layers))
        self.last = nn.Linear(num_features, 1)

    def forward(self, features: Tensor) -> Tensor:
        x = (features.float() - self.mean) * self.scale
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        logits: Tensor = self.last(x)[..., 0]
        return logits


def fit(features: Tensor, labels: Tensor, num_layers: int, no_weight: float, seed: int) -> BinaryHead:
    """Fit a head to features [N, F] and labels [N] from 0, a no, to 1, a yes; `no_weight` is w.

    With no layer it is logistic regression; the seed is of its first weights.

    Raises:
        ValueError: there are no examples, or labels are no probabilities.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1] or not len(labels):
        raise ValueError(f"wanted features [N, F] and labels [N]; got {list(features.shape)} and {list(labels.shape)}")
    if not (labels.min() >= 0 and labels.max() <= 1):
        raise ValueError(f"labels must be from 0 to 1, got {float(labels.min()):g} to {float(labels.max()):g}")
    features, labels = features.detach().float(), labels.detach().float()
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        head = BinaryHead(features.shape[1], num_layers)
        head.mean.copy_(features.mean(dim=0))
        head.scale.copy_(1 / features.std(dim=0, correction=0).clamp(min=1e-3))
        weights = labels + no_weight * (1 - labels)
        targets = labels / weights  # of the weighed sum, so that one function has both parts
        optimizer = torch.optim.AdamW(head.parameters(), lr=LEARNING_RATE, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            losses = functional.binary_cross_entropy_with_logits(head(features), targets, reduction="none")
            ((weights * losses).sum() / weights.sum()).backward()
            optimizer.step()
            schedule.step()
    return head.eval().requires_grad_(False)


def save(head: BinaryHead, file: Path) -> None:
    """Write a head as safetensors."""
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, file)


def load(file: Path, num_features: int) -> BinaryHead:
    """Read a head; ValueError if there is no such file, or its head is for other features."""
    if not file.is_file():
        raise ValueError(f"there is no file {file} with a head")
    head = _read(file, file.stat().st_mtime_ns)
    if len(head.mean) != num_features:
        raise ValueError(f"the head of {file} reads {len(head.mean)} features; wanted one for {num_features}")
    return head


@lru_cache(maxsize=2)
def _read(file: Path, written_ns: int) -> BinaryHead:
    tensors = load_file(file)
    if "mean" not in tensors:
        raise ValueError(f"{file} holds no head, but tensors {', '.join(sorted(tensors)[:3])}")
    head = BinaryHead(len(tensors["mean"]), sum(name.startswith("layers.") for name in tensors) // 2)
    head.load_state_dict(tensors)
    return head.eval().requires_grad_(False)
