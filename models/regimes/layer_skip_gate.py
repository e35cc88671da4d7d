"""Input-adaptive layer skipping: a small recurrent gate decides for each row which blocks it goes through.

Before block l the gate reads the mean of the row's states, padding left out, projects it to 10 numbers, runs one LSTM
cell that all blocks share, and gives the probability p of running the block. A coin with that probability decides; a
row that is left out costs nothing. Gates and blocks are trained together on loss + `cost_weight` · mean p, every block
costing the same. Through the coin the gradient of p is ⟨∂loss/∂output, block's share⟩ / p where the block ran, 0 where
it did not: without bias if the output were linear in the coin, and without running what was skipped.

What readers of the papers would not expect: SkipNet runs every block while it trains and uses a straight-through gate
or reinforcement, E2-Train skips in training as here; both keep their gates afterwards, here they are taken out and the
plain model runs all of its blocks. What a block adds is scaled by its running mean of p then (`fold`), which is what
the blocks after it have learnt to read. Adam moves a weight by the learning rate a step at most, so that gates would
take thousands of steps to close: their logit is multiplied by `speed`. p is kept above `floor`, or a gate that has
closed would never learn better.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.layers.linears import blocks
from models.core.layers.partial import make_partial, make_whole
from models.params import BaseParams
from models.regimes import Batch, Skipping

PAPER = "arXiv:1711.09485, section 3 (SkipNet); arXiv:1910.13349, section 3.2 (SLU)"
CHANGES = ("depth",)
MEMORY = 0.9  # of the running mean of p, a step
WIDTH = 10  # of the gate's input and state, in both papers


class Params(BaseParams):
    """What a block that runs costs, in nats, and how gates start."""

    name: Literal["layer_skip_gate"] = "layer_skip_gate"
    cost_weight: float = Field(0.1, ge=0, description="nats a token that running all blocks adds to the loss.")
    start: float = Field(0.9, gt=0, lt=1, description="probability with which a block runs at first.")
    floor: float = Field(0.1, gt=0, lt=1, description="least probability with which a block runs.")
    speed: float = Field(10.0, gt=0, description="by how much faster than blocks gates learn.")
    fold: bool = Field(
        True, description="whether the probability with which a block ran at last is multiplied into what it adds."
    )


CORNERS = (Params(fold=False),)


def changes(params: Params) -> tuple[str, ...]:
    """Return what is changed; only what is folded is written into weights."""
    return (*CHANGES, "frozen weights") if params.fold else CHANGES


class Gate(nn.Module):
    """Gives the probabilities of running, block after block, of a batch."""

    def __init__(self, hidden_size: int, start: float, speed: float, rng: torch.Generator) -> None:
        super().__init__()
        self.speed = speed
        self.project = nn.utils.skip_init(nn.Linear, hidden_size, WIDTH)
        self.cell = nn.utils.skip_init(nn.LSTMCell, WIDTH, WIDTH)
        self.decide = nn.utils.skip_init(nn.Linear, WIDTH, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.0
                parameter.copy_(scale * torch.randn(parameter.shape, generator=rng))
            self.decide.weight.zero_()
            self.decide.bias.fill_(torch.tensor(start).logit() / speed)

    def forward(self, states: Tensor, memory: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return probabilities [B] for mean states [B, H], and the memory for the next block."""
        memory = self.cell(self.project(states), memory)
        return (self.speed * self.decide(memory[0])[:, 0]).sigmoid(), memory


class Hooks(Skipping):
    """Refuses a model that is not of Llama's layout."""

    params: Params

    def __init__(self, params: Params, rng: torch.Generator) -> None:
        super().__init__(params, rng)
        self.means: dict[int, float] = {}  # block to the running mean of p

    def start(self, model: PreTrainedModel, num_steps: int) -> list[nn.Parameter]:
        gate = Gate(model.config.hidden_size, self.params.start, self.params.speed, self.rng)
        self.gate = gate.to(model.device)
        make_partial(model, self._choose)
        self.handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        return list(self.gate.parameters())

    def after_step(self, model: PreTrainedModel) -> None:
        found = torch.stack([probability.detach().mean() for probability in self.probabilities]).tolist()
        for index, mean in enumerate(found):
            self.means[index] = MEMORY * self.means.get(index, mean) + (1 - MEMORY) * mean

    def penalty(self, model: PreTrainedModel, batch: Batch) -> Tensor | None:
        return self.params.cost_weight * torch.stack(self.probabilities).mean()

    @torch.no_grad()
    def finish(self, model: PreTrainedModel) -> None:
        super().finish(model)
        make_whole(model)
        for index, mean in self.means.items() if self.params.fold else ():
            block = blocks(model)[index]
            for layer in (block.self_attn.o_proj, block.mlp.down_proj):
                for parameter in layer.parameters():
                    parameter.mul_(mean)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "means": {str(index): mean for index, mean in self.means.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.means = {int(index): mean for index, mean in state["means"].items()}

    def _begin(self, model: nn.Module, args: tuple[Tensor, ...], settings: dict[str, Any]) -> None:
        if not model.training:
            return
        self.read = (settings["labels"] != -100).to(torch.float32)
        self.probabilities: list[Tensor] = []
        self.memory: tuple[Tensor, Tensor] | None = None

    def _choose(self, index: int, hidden: Tensor) -> Tensor:
        mean = torch.einsum("bth,bt->bh", hidden.detach().float(), self.read) / self.read.sum(1, keepdim=True)
        gate, self.memory = self.gate(mean, self.memory)
        probability: Tensor = self.params.floor + (1 - self.params.floor) * gate
        self.probabilities.append(probability)
        runs = torch.rand(len(hidden), generator=self.coins).to(hidden.device) < probability
        self.count(runs)
        relative = probability / probability.detach()  # 1, with the gradient of p over p
        return runs * relative.to(hidden.dtype)
