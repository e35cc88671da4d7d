"""Paged optimizer state: AdamW's moments lie where memory is cheap, and are brought in for the moment of a step.

On a GPU they lie in page-locked memory of the host, and are copied there and back around each step. On a CPU they lie
in a file that is mapped into memory, without a name: the system writes out what it needs the room of, and reads it
again. The file is as large as two float32 for each trained parameter; it lies in the folder for temporary files, which
should not itself be in memory. The arithmetic is the same to the last bit.
"""

import tempfile
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from models.params import BaseParams
from models.regimes import Regime

PAPER = "arXiv:2305.14314, section 3, paged optimizers"
CHANGES = ("optimizer",)
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Params(BaseParams):
    """Where the state lies."""

    name: Literal["paged_state"] = "paged_state"
    folder: str | None = Field(None, description="on a CPU, of the mapped file; None is that for temporary files.")


class Hooks(Regime):
    """Figure: `paged_mib` of state."""

    params: Params

    def hold(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.pages: dict[nn.Parameter, dict[str, Tensor]] = {}
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        size = 2 * sum(parameter.numel() for parameter in trained)
        on_gpu = trained[0].device.type == "cuda"
        state = torch.zeros(size, pin_memory=True) if on_gpu else _mapped(size, self.params.folder)
        views = iter(state.split([parameter.numel() for parameter in trained for _ in _MOMENTS]))
        for parameter in trained:
            moments = {moment: next(views).view(parameter.shape) for moment in _MOMENTS}
            step = torch.zeros((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {"step": step, **moments}
            if on_gpu:
                self.pages[parameter] = moments
        self.num_bytes = state.nbytes

    def after_backward(self, model: PreTrainedModel) -> None:
        for parameter, moments in self.pages.items():
            for moment, page in moments.items():
                self.optimizer.state[parameter][moment] = page.to(parameter.device, non_blocking=True)

    def after_step(self, model: PreTrainedModel) -> None:
        for parameter, moments in self.pages.items():
            for moment, page in moments.items():
                page.copy_(self.optimizer.state[parameter][moment])
                self.optimizer.state[parameter][moment] = page

    def figures(self) -> dict[str, float]:
        return {"paged_mib": self.num_bytes / 2**20}


def _mapped(size: int, folder: str | None) -> Tensor:
    """Return zeroes that lie in a file, which goes when nothing refers to them any more."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="redraft-state-") as file:
        file.truncate(4 * size)
        return torch.from_file(file.name, shared=True, size=size, dtype=torch.float32)
