"""Sheared: masks on blocks, heads, MLP channels and hidden channels are learnt together with the weights until as much
is open as the shape that is asked for has; then what they close is cut out and the model trains on.

A mask is hard concrete (arXiv:1712.01312): z = clamp(1.2·s − 0.1, 0, 1), s = σ((logit u + a) / β), u uniform, β = 2/3,
and open with probability P = σ(a − β·log(0.1 / 1.1)). For each kind and block the share e = mean P is held to the
share t that is asked for by what is added to the loss, λ·(e − t) + φ·(e − t)², of which λ and φ climb while the masks
descend. t falls from 1 in the first `warmup` of the steps.

What a reader of the paper would not expect: KV heads and the query heads within each have masks of their own, since
Sheared LLaMA's models had no groups. Masks start open (a = 4). A masked hidden channel is hidden from every norm, whose
mean is over open channels only. After the last step the highest a of each kind stay, exactly as many as asked for, and
what is left of their masks is multiplied into the weights. Masks learn with Adam outside of the loop's optimizer, at
the paper's rate.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from models.core.checkpoints.invariants import keep_zeroes
from models.core.layers.linears import blocks
from models.core.layers.reshape import Kept, head_dim, take_layers, take_widths
from models.core.learning.training import OnProgress, cut, num_steps, train
from models.params import TrainingParams
from models.regimes import Batch, Regime
from models.shrink import Shape, Widths, choose, choose_heads, norms, shape_of, wanted_shape

PAPER = "arXiv:2310.06694, section 2.1"
KEEPS_TOKENS = True
TRAINS = True
BETA, LOW, HIGH, START = 2 / 3, -0.1, 1.1, 4.0
_OPEN = BETA * torch.tensor(-LOW / HIGH).log().item()


class Params(Widths):
    """The shape that is asked for, and how it is learnt.

    Attributes:
        num_layers: blocks that stay; None keeps all.
        mask_share: of the documents that the masks are learnt on; the shrunk model trains on the others.
        mask_learning_rate: of masks, λ and φ.
        warmup: share of the mask steps in which the shape is approached.
        min_mask_steps: fewer are refused, because masks that have not settled choose at random.
    """

    name: Literal["sheared"] = "sheared"
    num_layers: int | None = Field(None, ge=1)
    mask_share: float = Field(0.5, gt=0, lt=1)
    mask_learning_rate: float = Field(1.0, gt=0)
    warmup: float = Field(0.2, ge=0, lt=1)
    min_mask_steps: int = Field(200, ge=1)


CORNERS = (Params(num_layers=1, intermediate_size=128, min_mask_steps=1),)


def shrink(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    params: Params,
    training: TrainingParams,
    seed: int = 0,
    work_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> PreTrainedModel:
    """Learn which parts stay on one half of the documents, cut the others out and train on with the other half.

    ValueError as `models.shrink`; documents may be too few for two halves or for as many steps as masks need.
    FloatingPointError if the loss is NaN or infinite.
    """
    shape = wanted_shape(model, params, params.num_layers)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(documents), generator=rng).tolist()
    num_masked = round(params.mask_share * len(documents))
    if not 0 < num_masked < len(documents):
        raise ValueError(f"{len(documents)} documents leave one half empty at mask_share {params.mask_share:g}")
    halves = [documents[n] for n in order[:num_masked]], [documents[n] for n in order[num_masked:]]
    if (steps := num_steps(halves[0], training)) < params.min_mask_steps:
        raise ValueError(
            f"masks would be learnt in {steps} steps; min_mask_steps is {params.min_mask_steps}: take more documents, "
            "more epochs or smaller batches"
        )
    totals = [training.num_epochs * sum(map(len, cut(half, training.max_length))) for half in halves]
    folders = [None if work_dir is None else work_dir / name for name in ("masks", "continued")]
    masked = take_layers(model, range(shape_of(model).num_layers))
    keep_zeroes(model, masked)
    masks = Masks(masked, shape, params, rng)
    train(masked, halves[0], training, [masks], seed, folders[0], _both(totals, 0, on_progress))
    shrunk = masks.cut(masked)
    keep_zeroes(masked, shrunk)
    train(shrunk, halves[1], training, (), seed, folders[1], _both(totals, 1, on_progress))
    return shrunk


class Masks(Regime):
    """The masks as hooks of the training loop.

    Attributes:
        scores: kind to a, [rows, n]; a row's n masks share one constraint. Only kinds that shrink have any.
        wanted: kind to how many of a row stay.
    """

    handles: list[RemovableHandle]

    def __init__(self, model: PreTrainedModel, shape: Shape, params: Params, rng: torch.Generator) -> None:
        has, self.shape, self.params, self.rng = shape_of(model), shape, params, rng
        per_kv, wanted_per_kv = has.num_heads // has.num_kv_heads, shape.num_heads // shape.num_kv_heads
        kinds = {
            "layers": (1, has.num_layers, shape.num_layers),
            "hidden": (1, has.hidden_size, shape.hidden_size),
            "kv_heads": (has.num_layers, has.num_kv_heads, shape.num_kv_heads),
            "heads": (has.num_layers * has.num_kv_heads, per_kv, wanted_per_kv),
            "channels": (has.num_layers, has.intermediate_size, shape.intermediate_size),
        }
        self.has = has
        self.wanted = {kind: wanted for kind, (_, size, wanted) in kinds.items() if wanted < size}
        self.scores = {
            kind: torch.full(kinds[kind][:2], START, device=model.device).requires_grad_() for kind in self.wanted
        }
        # λ and φ of each row.
        self.multipliers = {
            kind: torch.zeros(2, len(a), device=model.device).requires_grad_() for kind, a in self.scores.items()
        }
        rate = params.mask_learning_rate
        self.optimizers = (
            torch.optim.Adam(self.scores.values(), lr=rate),
            torch.optim.Adam(self.multipliers.values(), lr=rate, maximize=True),
        )
        self.progress = 0.0
        self.drawn: dict[str, Tensor] = {}
        self.handles = []

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        self.num_steps = num_steps
        width = head_dim(model.config)
        for number, block in enumerate(blocks(model)):
            self._hang(block.self_attn.o_proj, number, partial(self._heads, width=width))
            self._hang(block.mlp.down_proj, number, partial(self._row, "channels"))
        for norm in norms(model):
            self._before(norm, lambda states: _times(states, self._row("hidden", 0)))
            self._after(norm, self._rescaled)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        self.progress = min(1.0, (step + 1) / max(self.params.warmup * self.num_steps, 1.0))
        self.drawn = {kind: self._draw(scores) for kind, scores in self.scores.items()}
        yield
        self.drawn = {}

    def penalty(self, model: PreTrainedModel, batch: Batch) -> Tensor:
        terms = []
        for kind, scores in self.scores.items():
            target = 1 - self.progress * (1 - self.wanted[kind] / scores.shape[1])
            gap = torch.sigmoid(scores - _OPEN).mean(dim=1) - target
            linear, square = self.multipliers[kind]
            terms.append((linear * gap + square * gap.square()).sum())
        return torch.stack(terms).sum()

    def after_step(self, model: PreTrainedModel) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def figures(self) -> dict[str, float]:
        return {f"open_{k}": float(torch.sigmoid(a.detach() - _OPEN).mean()) for k, a in self.scores.items()}

    def state(self) -> dict[str, object]:
        return {"rng": self.rng.get_state().tolist(), "tensors": [tensor.tolist() for tensor in self._tensors()]}

    def restore(self, state: dict[str, Any]) -> None:
        self.rng.set_state(torch.tensor(state["rng"], dtype=torch.uint8))
        for tensor, values in zip(self._tensors(), state["tensors"], strict=True):
            tensor.copy_(torch.tensor(values))

    @torch.no_grad()
    def cut(self, model: PreTrainedModel) -> PreTrainedModel:
        """Multiply the masks into `model`'s weights and return what stays, in the shape that was asked for."""
        width = head_dim(model.config)
        self.drawn = {kind: _stretched(torch.sigmoid(scores)) for kind, scores in self.scores.items()}
        for number, block in enumerate(blocks(model)):
            layer = self._layer(number)
            for module, gate in (
                (block.self_attn.o_proj, self._heads(number, width)),
                (block.mlp.down_proj, self._row("channels", number)),
            ):
                module.weight.copy_(_times(_times(module.weight, gate), layer))
                if module.bias is not None:
                    module.bias.copy_(_times(module.bias, layer))
        for norm in norms(model):
            norm.weight.copy_(_times(norm.weight, self._row("hidden", 0)))
        self.drawn = {}
        layers = choose(self._scores("layers", 1, self.has.num_layers), self.shape.num_layers)[0]
        per_layer = self._scores("kv_heads", self.has.num_layers, self.has.num_kv_heads)[layers]
        heads = self._scores("heads", self.has.num_layers, self.has.num_heads)
        kept_heads, kv_heads = choose_heads(
            heads.view(self.has.num_layers, self.has.num_kv_heads, -1)[layers], per_layer, self.shape
        )
        channels = self._scores("channels", self.has.num_layers, self.has.intermediate_size)[layers]
        kept = Kept(
            hidden=choose(self._scores("hidden", 1, self.has.hidden_size), self.shape.hidden_size)[0],
            heads=kept_heads,
            kv_heads=kv_heads,
            channels=choose(channels, self.shape.intermediate_size),
        )
        return take_widths(take_layers(model, layers.tolist()), kept)

    def _scores(self, kind: str, num_rows: int, size: int) -> Tensor:
        """Return a of a kind, or equal scores where all of it stays."""
        return self.scores[kind].detach().cpu() if kind in self.scores else torch.zeros(num_rows, size)

    def _tensors(self) -> list[Tensor]:
        found = []
        for optimizer, kinds in zip(self.optimizers, (self.scores, self.multipliers), strict=True):
            for parameter in kinds.values():
                state = optimizer.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter, requires_grad=False)
                    state |= {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
                found += [parameter.detach(), state["step"], state["exp_avg"], state["exp_avg_sq"]]
        return found

    def _draw(self, scores: Tensor) -> Tensor:
        uniform = torch.rand(scores.shape, generator=self.rng).clamp(1e-6, 1 - 1e-6).to(scores.device)
        return _stretched(torch.sigmoid((torch.logit(uniform) + scores) / BETA))

    def _row(self, kind: str, number: int) -> Tensor | None:
        return self.drawn[kind][number] if kind in self.drawn else None

    def _layer(self, number: int) -> Tensor | None:
        return self.drawn["layers"][0, number] if "layers" in self.drawn else None

    def _heads(self, number: int, width: int) -> Tensor | None:
        """Return [A·width] what each channel of the heads' output is multiplied with."""
        num_kv = self.has.num_kv_heads
        per_kv = self._row("kv_heads", number)
        heads = self.drawn["heads"][number * num_kv : (number + 1) * num_kv] if "heads" in self.drawn else None
        if per_kv is None and heads is None:
            return None
        each = torch.ones(num_kv, self.has.num_heads // num_kv) if heads is None else heads
        each = each if per_kv is None else each.to(per_kv.device) * per_kv[:, None]
        return each.flatten().repeat_interleave(width)

    def _rescaled(self, states: Tensor) -> Tensor:
        """Make a norm's mean over all channels one over open channels; closed ones added nothing to it."""
        row = self._row("hidden", 0)
        return states if row is None else states * row.detach().mean().sqrt()

    def _hang(self, module: nn.Module, number: int, gate: Callable[[int], Tensor | None]) -> None:
        """Mask what a module of block `number` reads by `gate`, and what it hands on by the block's own mask."""
        self._before(module, lambda states: _times(states, gate(number)))
        self._after(module, lambda states: _times(states, self._layer(number)))

    def _before(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        self.handles.append(module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:])))

    def _after(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        self.handles.append(module.register_forward_hook(lambda module, args, output: change(output)))


def _stretched(shares: Tensor) -> Tensor:
    return (shares * (HIGH - LOW) + LOW).clamp(0, 1)


def _times(states: Tensor, gate: Tensor | None) -> Tensor:
    return states if gate is None else states * gate


def _both(totals: Sequence[int], half: int, on_progress: OnProgress | None) -> OnProgress | None:
    if on_progress is None:
        return None
    before = sum(totals[:half])
    return lambda one: on_progress(one._replace(done=before + one.done, total=sum(totals)))
