"""Duo-LLM: a small feed-forward module beside each big one, and for each token the choice between them, layer by layer.

To find what choosing could give, three things are compared at as many big modules a token:

- coins, which are what small modules are trained under, since no choice is known yet (`RandomRouting`);
- an oracle, which tries for one token after the other all ways through the layers, those of earlier tokens being fixed,
  and takes the one after which the next token is likeliest (`oracle`). It has to know that token, so no machine can be
  it: it bounds what routers may reach;
- routers, one a layer, which read what the module reads and are fit to the oracle's choices (`fit_routers`).

The paper trains big and small modules together from the start. Here the big ones are a finished model's and stay, and a
small one adds nothing before it is trained, which is the paper's third choice, to pass a layer by. A library: engines
serve plain models, and no plain one computes this.

Letters: L layers, B sequences, T tokens of one, H width, P ways through the layers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import product
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.core.learning import binary_head
from models.core.learning.binary_head import BinaryHead
from models.regimes import Regime

PAPER = "arXiv:2410.10846, sections 2 and 3"

Route = Callable[[Tensor], Tensor]  # what a module reads, [B, T, H] → [B, T], whether the big one is taken


class Duo(nn.Module):
    """A big module, a small one, and which of them each token goes through; without a route the big one."""

    def __init__(self, big: nn.Module, width: int, small_width: int, rng: torch.Generator) -> None:
        super().__init__()
        self.big = big
        self.up, self.down = nn.Linear(width, small_width), nn.Linear(small_width, width)
        self.route: Route | None = None
        with torch.no_grad():
            self.up.weight.copy_(torch.randn(self.up.weight.shape, generator=rng) / width**0.5)
            for still in (self.up.bias, self.down.weight, self.down.bias):
                still.zero_()

    def forward(self, states: Tensor) -> Tensor:
        if self.route is None:
            whole: Tensor = self.big(states)
            return whole
        small = self.down(functional.silu(self.up(states)))
        return torch.where(self.route(states)[..., None], self.big(states), small)


def insert(model: PreTrainedModel, small_width: int, rng: torch.Generator) -> list[Duo]:
    """Put a small module beside each feed-forward module, in place; only small ones need a gradient afterwards.

    The model's logits stay. ValueError if the width is none, or the model is not of Llama's layout or has such modules.
    """
    if small_width < 1:
        raise ValueError(f"small_width must be from 1, got {small_width}")
    if any(isinstance(block.mlp, Duo) for block in blocks(model)):
        raise ValueError("the model has small modules already")
    model.requires_grad_(False)
    duos = []
    for block in blocks(model):
        duos.append(Duo(block.mlp, model.config.hidden_size, small_width, rng).to(model.device, model.dtype))
        cast("nn.Module", block).add_module("mlp", duos[-1])
    return duos


@contextmanager
def routed(duos: Sequence[Duo], routes: Sequence[Route]) -> Iterator[None]:
    """Let tokens go through the layers by these routes for a while."""
    for duo, route in zip(duos, routes, strict=True):
        duo.route = route
    try:
        yield
    finally:
        for duo in duos:
            duo.route = None


def fixed(ways: Tensor) -> list[Route]:
    """Return routes that are given: [L, B, T], or [L, 1, T] for any B."""
    return [partial(_given, way) for way in ways]


def _given(way: Tensor, states: Tensor) -> Tensor:
    return way.expand(states.shape[:2])


class RandomRouting(Regime):
    """What small modules learn under: for each token and layer a coin takes the big one."""

    def __init__(self, duos: Sequence[Duo], big_share: float, rng: torch.Generator) -> None:
        """Raise ValueError where the share of big ones is no probability."""
        if not 0 <= big_share <= 1:
            raise ValueError(f"big_share must be from 0 to 1, got {big_share}")
        self._duos, self._share = duos, big_share
        self._seed, self._rng = int(torch.randint(2**31, (1,), generator=rng)), torch.Generator()

    def around(self, step: int) -> AbstractContextManager[object]:
        self._rng.manual_seed(self._seed + step)  # a resumed run draws the same
        return routed(self._duos, [self._coins] * len(self._duos))

    def _coins(self, states: Tensor) -> Tensor:
        drawn = torch.rand(states.shape[:2], generator=self._rng) < self._share
        return drawn.to(states.device)


@torch.no_grad()
def losses(model: PreTrainedModel, duos: Sequence[Duo], token_ids: Sequence[int], ways: Tensor) -> Tensor:
    """Return what each next token costs, [P, T − 1] nats, by whether each token but the last takes the big module."""
    read = torch.tensor([list(token_ids)] * ways.shape[1], device=model.device)
    with routed(duos, fixed(ways.to(model.device))):
        logits = model(input_ids=read[:, :-1], use_cache=False).logits.float()
    return functional.cross_entropy(logits.transpose(1, 2), read[:, 1:], reduction="none").cpu()


def oracle(model: PreTrainedModel, duos: Sequence[Duo], token_ids: Sequence[int], num_big: int) -> Tensor:
    """Return the ways [L, T − 1] that make each next token likeliest, token after token, of `num_big` big ones at most.

    Of ways that cost as much the one with fewest is taken. ValueError if there is nothing to predict, or there are
    not so many modules.
    """
    if len(token_ids) < 2:
        raise ValueError(f"wanted 2 tokens and more, got {len(token_ids)}")
    if not 0 <= num_big <= len(duos):
        raise ValueError(f"num_big must be from 0 to {len(duos)}, got {num_big}")
    choices = sorted((way for way in product((False, True), repeat=len(duos)) if sum(way) <= num_big), key=sum)
    tried = torch.tensor(choices).T  # [L, P]
    best = torch.zeros(len(duos), len(token_ids) - 1, dtype=torch.bool)
    for place in range(len(token_ids) - 1):
        ways = best[:, None, : place + 1].repeat(1, tried.shape[1], 1)
        ways[:, :, place] = tried
        cost = losses(model, duos, token_ids[: place + 2], ways)[:, place]
        cheapest = int((cost <= cost.min() + 1e-6).nonzero()[0])
        best[:, place] = tried[:, cheapest]
    return best


@torch.no_grad()
def inputs(model: PreTrainedModel, duos: Sequence[Duo], token_ids: Sequence[int], ways: Tensor) -> Tensor:
    """Return what each module reads, [L, T − 1, H], where tokens go these ways [L, T − 1]."""
    seen: list[Tensor] = []
    hooks = [duo.register_forward_pre_hook(lambda module, args: seen.append(args[0][0].float().cpu())) for duo in duos]
    try:
        losses(model, duos, token_ids, ways[:, None])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(seen)


def fit_routers(read: Tensor, ways: Tensor, num_layers: int = 0, seed: int = 0) -> list[BinaryHead]:
    """Fit a router a layer to what modules read [L, N, H] and the oracle chose there [L, N]; 0 layers are logistic."""
    return [
        binary_head.fit(features, chosen.float(), num_layers, 1.0, seed)
        for features, chosen in zip(read, ways, strict=True)
    ]


def by_routers(routers: Sequence[BinaryHead], thresholds: Sequence[float]) -> list[Route]:
    """Return routes that take the big module where a layer's router says more than its threshold, a logit."""

    def route(router: BinaryHead, threshold: float) -> Route:
        return lambda states: router(states.cpu()).to(states.device) > threshold

    return [route(router, threshold) for router, threshold in zip(routers, thresholds, strict=True)]
