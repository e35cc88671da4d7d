"""Lottery ticket: train, drop the smallest weights, take the others back to what they were early on, and again.

One round trains the model, drops `pruned_share` of the weights that are left, the smallest of all linear layers
together, and sets the others back to their values at step i, `rewind` of the way through the first training; every
later training starts at step i, with that step's batches and learning rate. After `num_rounds` rounds the ticket is
trained once more, and that is the model that comes out, with (1 − pruned_share)^num_rounds of its weights not zero.
Where zeroes stand is noted as promised (`models.core.checkpoints.invariants`).

Two controls come as settings: "random" permutes each layer's last mask, "reinitialised" keeps the mask and draws new
weights, trained from step 0.

What readers of the paper would not expect: Adam's moments start anew at step i; embeddings, output matrix and norms are
spared; a model that was trained before is drawn anew by "reinitialised" all the same.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from models.core.layers.linears import linears
from models.core.learning import training as loop
from models.params import BaseParams, TrainingParams
from models.regimes import Regime

PAPER = "arXiv:1903.01611, algorithm 2; controls of arXiv:1803.03635 and arXiv:1810.05270"
CHANGES = ("loop", "frozen weights")
KEEPS = ("zeroes",)


class Params(BaseParams):
    """How much is dropped, and what the ticket is."""

    name: Literal["iterative_magnitude"] = "iterative_magnitude"
    num_rounds: int = Field(3, ge=1, description="trainings before the last one.")
    pruned_share: float = Field(0.2, gt=0, lt=1, description="of the weights that are left, dropped after each.")
    rewind: float = Field(
        0.05, ge=0, lt=1, description="step i as a share of a training's steps; 0 rewinds to the very start."
    )
    ticket: Literal["rewound", "random", "reinitialised"] = Field(
        "rewound", description='"rewound", or one of the two controls.'
    )


CORNERS = (Params(num_rounds=1, ticket="random"), Params(num_rounds=1, ticket="reinitialised"))


COMPARED = {"random_mask": Params(ticket="random"), "reinitialised": Params(ticket="reinitialised")}


def train(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    params: Params,
    training: TrainingParams,
    seed: int = 0,
    work_dir: Path | None = None,
    on_progress: loop.OnProgress | None = None,
) -> loop.Trained:
    """Find a ticket and train it in place; see `models.core.learning.training.train`.

    Returned are the last training's losses; tokens, steps and seconds of all trainings together; figure "sparsity".
    ValueError if there is nothing to learn, or the model is not of Llama's layout. FloatingPointError if a loss is NaN
    or infinite.
    """
    folder = None if work_dir is None else work_dir / _digest(params, training, seed, documents)
    whole = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in linears(model)}
    found = _load(folder, model.device) or _Found(0, whole, {}, (0, 0, 0.0))
    while True:
        last = found.num_rounds == params.num_rounds
        masks, rewind = found.masks, params.rewind
        if found.num_rounds > 0:
            _set(model, found.start)
        if last:
            rng = torch.Generator().manual_seed(seed)
            if params.ticket == "random":
                masks = {name: _permute(mask, rng) for name, mask in masks.items()}
            if params.ticket == "reinitialised":
                rewind = _reinitialise(model, rng)
        ticket = _Ticket(masks, rewind, found.start, folder)
        report = None if on_progress is None else _share(on_progress, found.num_rounds, params.num_rounds + 1)
        round_dir = None if folder is None else folder / f"round-{found.num_rounds}"
        trained = loop.train(model, documents, training, [ticket], seed, round_dir, report)
        num_tokens, num_steps, seconds = found.spent
        spent = (num_tokens + trained.num_tokens, num_steps + trained.num_steps, seconds + trained.seconds)
        if last:
            break
        weights = {name: layer.weight for name, layer in linears(model)}
        fewer = smallest(weights, masks, params.pruned_share)
        found = _Found(found.num_rounds + 1, fewer, ticket.caught(), spent)
        _save(folder, found)
        if round_dir is not None:
            shutil.rmtree(round_dir)
    num_tokens, num_steps, seconds = spent
    num_kept = sum(int(mask.sum()) for mask in masks.values())
    sparsity = 1 - num_kept / sum(mask.numel() for mask in masks.values())
    return trained._replace(num_tokens=num_tokens, num_steps=num_steps, seconds=seconds, figures={"sparsity": sparsity})


def smallest(weights: Mapping[str, Tensor], masks: Mapping[str, Tensor], pruned_share: float) -> dict[str, Tensor]:
    """Return masks without the smallest share, rounded down, of weights that `masks` keep, of all layers together."""
    sizes = torch.cat([weights[name].detach().abs()[mask] for name, mask in masks.items()])
    kept = torch.ones(len(sizes), dtype=torch.bool, device=sizes.device)
    kept[sizes.argsort()[: int(pruned_share * len(sizes))]] = False
    fewer = {}
    for name, mask in masks.items():
        fewer[name] = mask.clone()
        fewer[name][mask], kept = kept[: int(mask.sum())], kept[int(mask.sum()) :]
    return fewer


class _Found(NamedTuple):
    """What is known after `num_rounds` rounds: masks, the weights at step i, and tokens, steps and seconds spent."""

    num_rounds: int
    masks: dict[str, Tensor]
    start: dict[str, Tensor]
    spent: tuple[int, int, float]


class _Ticket(Regime):
    """Trains what the masks keep, from step i on; in the first round from step 0, catching the weights at step i."""

    def __init__(
        self, masks: Mapping[str, Tensor], rewind: float, start: Mapping[str, Tensor], folder: Path | None
    ) -> None:
        self.masks, self.rewind, self.weights = masks, rewind, dict(start)
        self.file = None if folder is None else folder / "start.safetensors"
        self.first_round = not start

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        self.model = model
        self.first_step = int(self.rewind * num_steps)
        self._mask(layer.weight for _, layer in linears(model))

    def runs(self, step: int) -> bool:
        if not self.first_round:
            return step >= self.first_step
        if step == self.first_step:
            self.weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
            if self.file is not None:  # a run that is killed later has passed this step
                self.file.parent.mkdir(parents=True, exist_ok=True)
                _write(self.weights, self.file, {})
        return True

    def after_backward(self, model: PreTrainedModel) -> None:
        # No gradient and no moment: a weight that is zero stays so.
        self._mask(layer.weight.grad for _, layer in linears(model))

    def caught(self) -> dict[str, Tensor]:
        if not self.weights:
            assert self.file is not None
            self.weights = load_file(self.file)
        return self.weights

    @torch.no_grad()
    def _mask(self, tensors: Iterable[Tensor | None]) -> None:
        for tensor, mask in zip(tensors, self.masks.values(), strict=True):
            if tensor is not None:
                tensor.mul_(mask)


@torch.no_grad()
def _set(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        weight.copy_(weights[name])


def _permute(mask: Tensor, rng: torch.Generator) -> Tensor:
    order = torch.randperm(mask.numel(), generator=rng).to(mask.device)
    return mask.flatten()[order].view_as(mask)


@torch.no_grad()
def _reinitialise(model: PreTrainedModel, rng: torch.Generator) -> float:
    """Draw all weights anew as a Llama's are; return where its training starts, as a share of the steps."""
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            weight.copy_(model.config.initializer_range * torch.randn(weight.shape, generator=rng))
        else:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return 0.0


def _share(report: loop.OnProgress, number: int, num_trainings: int) -> loop.OnProgress:
    """Report progress of training `number` as that of all; later ones are a little shorter, which is not seen."""
    return lambda one: report(one._replace(done=one.done + number * one.total, total=one.total * num_trainings))


def _digest(params: Params, training: TrainingParams, seed: int, documents: Sequence[Sequence[int]]) -> str:
    settings = [params.model_dump(), training.model_dump(exclude={"checkpoint_s"}), seed, list(map(list, documents))]
    return "ticket-" + hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _save(folder: Path | None, found: _Found) -> None:
    if folder is not None:
        metadata = {"num_rounds": json.dumps(found.num_rounds), "spent": json.dumps(found.spent)}
        _write(found.masks, folder / "masks.safetensors", metadata)


def _load(folder: Path | None, device: torch.device) -> _Found | None:
    if folder is None or not (folder / "masks.safetensors").is_file():
        return None
    with safe_open(folder / "masks.safetensors", framework="pt") as handle:
        metadata = handle.metadata()
        masks = {name: handle.get_tensor(name).to(device) for name in handle.keys()}  # noqa: SIM118
    num_tokens, num_steps, seconds = json.loads(metadata["spent"])
    start = load_file(folder / "start.safetensors")
    return _Found(json.loads(metadata["num_rounds"]), masks, start, (num_tokens, num_steps, seconds))


def _write(tensors: Mapping[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{file}.new", metadata=metadata)
    os.replace(f"{file}.new", file)
