"""Linear layers that multiply in another way while they are trained, and the regime that swaps them in and out.

A layer of this kind shares the weight and bias of the plain one, so that optimizer, checkpoints and state dict see no
difference. The linear layers of the decoder blocks are changed, frozen ones of 4 bits too; output matrix and the
products inside of attention stay as they are but where a regime says `EVERYWHERE`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from models.core.layers.linears import blocks, linears
from models.core.layers.normal_float import NormalFloatLinear
from models.regimes import Regime

Change = Callable[[Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]
_NAME, _PAIRS = "changed_products", "multiply_pairs"


class ProductLinear(nn.Linear):
    """A linear layer whose product is given, with the parameters of `layer` themselves; plain in evaluation mode unless
    `always`.

    Whoever asks the model something between two steps would otherwise get answers that hang on the other rows, which
    share a scale, and would use up random numbers.
    """

    def __init__(self, layer: nn.Linear, multiply: Product, always: bool = False) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias, self.multiply, self.always = layer.weight, layer.bias, multiply, always

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., I] → [..., O], in the weight's dtype also under autocast: bfloat16 can't hold every format."""
        if not self.training and not self.always:
            return super().forward(inputs)
        output = _apart(self.multiply, inputs, self.weight)
        return output if self.bias is None else output + self.bias


def _apart(multiply: Product, inputs: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, enabled=False):
        return multiply(inputs.to(weight.dtype), weight)


class ProductRegime(Regime):
    """A regime that changes how linear layers multiply; a method gives `multiply`.

    It keeps the state of its generator and its figures in the loop's checkpoint, so that a resumed run draws what the
    whole one would have.

    Attributes:
        EVERYWHERE: whether the output matrix and attention multiply so too, by `multiply_pairs`.
    """

    EVERYWHERE = False

    rng: torch.Generator

    def __init__(self, params: Any, rng: torch.Generator) -> None:
        super().__init__(params, rng)
        self._plain: dict[str, nn.Linear] = {}
        self._sums: dict[str, list[Tensor | float]] = {}
        self._attention = ""  # what the model's was before

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """[..., I] times [O, I] → [..., O], with the backward pass of the method."""
        raise NotImplementedError

    def multiply_pairs(self, left: Tensor, right: Tensor) -> Tensor:
        """[..., R, I] times [..., C, I] → [..., R, C], both of them activations."""
        raise NotImplementedError

    def require(self, name: str, layer: nn.Linear) -> None:
        """Raise ValueError naming a layer that the method can't handle."""

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        self._plain = self._layers(model)
        for name, layer in self._plain.items():
            self.require(name, layer)
        self._put(model, self.multiply, always=False)

    def finish(self, model: PreTrainedModel) -> None:
        self._take(model, self._plain)

    @contextmanager
    def multiplying(self, model: PreTrainedModel, multiply: Product) -> Iterator[None]:
        """Let the layers of a finished model multiply by `multiply` for a while, in evaluation mode too."""
        plain = self._layers(model)
        self._put(model, multiply, always=True)
        try:
            yield
        finally:
            self._take(model, plain)

    def _layers(self, model: PreTrainedModel) -> dict[str, nn.Linear]:
        return dict(linears(model)) | ({"lm_head": model.lm_head} if self.EVERYWHERE else {})

    def _put(self, model: PreTrainedModel, multiply: Product, always: bool) -> None:
        for name, layer in self._layers(model).items():
            model.set_submodule(name, ProductLinear(layer, multiply, always))
        for packed in _packed(model):
            packed.multiply = partial(_apart, multiply)
        if self.EVERYWHERE:
            self._attention = _put_in(model, self.multiply_pairs, always)

    def _take(self, model: PreTrainedModel, plain: Mapping[str, nn.Linear]) -> None:
        for name, layer in plain.items():
            model.set_submodule(name, layer)
        for packed in _packed(model):
            packed.multiply = None
        if self.EVERYWHERE:
            _take_out(model, self._attention)

    def weights(self) -> list[Tensor]:
        """Return the weights that are multiplied by and trained; frozen ones stay as they are."""
        return [layer.weight for layer in self._plain.values() if layer.weight.requires_grad]

    def count(self, figure: str, part: Tensor | float, whole: Tensor | float = 1.0) -> None:
        """Add to a figure, the sum of the parts over the sum of the wholes; there is none while that is 0.

        What is a tensor is summed where it lies: nothing waits for a GPU before somebody asks.
        """
        part, whole = (one.detach().double() if isinstance(one, Tensor) else one for one in (part, whole))
        before = self._sums.get(figure, [0.0, 0.0])
        self._sums[figure] = [before[0] + part, before[1] + whole]

    def figures(self) -> dict[str, float]:
        return {figure: part / whole for figure, (part, whole) in self._read().items() if whole}

    def state(self) -> dict[str, object]:
        return {"rng": bytes(self.rng.get_state().tolist()).hex(), "sums": self._read()}

    def restore(self, state: dict[str, Any]) -> None:
        self.rng.set_state(torch.tensor(list(bytes.fromhex(state["rng"])), dtype=torch.uint8))
        self._sums = {figure: [float(part), float(whole)] for figure, (part, whole) in state["sums"].items()}

    def _read(self) -> dict[str, tuple[float, float]]:
        return {figure: (float(part), float(whole)) for figure, (part, whole) in self._sums.items()}


def _packed(model: PreTrainedModel) -> list[NormalFloatLinear]:
    return [module for module in model.modules() if isinstance(module, NormalFloatLinear)]


def _put_in(model: PreTrainedModel, multiply: Product, always: bool = False) -> str:
    """Let a model's attention multiply so, in evaluation mode too if `always`; return what it was before."""
    before: str = model.config._attn_implementation
    for block in blocks(model):
        setattr(block.self_attn, _PAIRS, (multiply, always))
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, eager_mask)
    model.config._attn_implementation = _NAME
    return before


def _take_out(model: PreTrainedModel, before: str) -> None:
    for block in blocks(model):
        delattr(block.self_attn, _PAIRS)
    model.config._attn_implementation = before


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **rest: Any
) -> tuple[Tensor, Tensor | None]:
    """[B, A, T, D] queries to [B, T, A, D]."""
    multiply, always = getattr(module, _PAIRS)
    if not module.training and not always:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)
        return plain
    num_groups = query.shape[1] // key.shape[1]
    scores = multiply(query, repeat_kv(key, num_groups)) * scaling + mask
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    attended: Tensor = multiply(weights, repeat_kv(value, num_groups).mT)
    return attended.transpose(1, 2).contiguous(), weights


def straight_through(values: Tensor, change: Change) -> Tensor:
    """Return `change(values)` whose gradient is passed on as if nothing had been changed."""
    changed: Tensor = _StraightThrough.apply(values, change)  # type: ignore[no-untyped-call]  # torch's own
    return changed


def on_gradient(values: Tensor, change: Change) -> Tensor:
    """Return `values`, whose gradient is changed on its way back."""
    same: Tensor = _OnGradient.apply(values, change)  # type: ignore[no-untyped-call]  # torch's own, without types
    return same


def linear(inputs: Tensor, weight: Tensor, data_gradient: Product, weight_gradient: Product) -> Tensor:
    """Return the plain product of [..., I] and [O, I], whose backward pass is given; neither part is asked for in vain.

    `data_gradient` makes [..., I] of (gradient [..., O], weight), `weight_gradient` [O, I] of (inputs [N, I], gradient
    [N, O]).
    """
    output: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]  # torch's own, without types
        inputs, weight, data_gradient, weight_gradient
    )
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, *gradients: Product) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.gradients = gradients
        return functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        inputs, weight = ctx.saved_tensors
        of_data, of_weight = ctx.gradients
        data = of_data(gradient, weight) if ctx.needs_input_grad[0] else None
        rows = inputs.flatten(0, -2), gradient.flatten(0, -2)
        return data, of_weight(*rows) if ctx.needs_input_grad[1] else None, None, None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: Tensor, change: Change) -> Tensor:
        return change(values)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _OnGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, change: Change) -> Tensor:
        ctx.change = change
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None
