"""vLLM's worker, and what redraft adds: replace the draft, prove what was loaded, stop and resume speculation.

Every method is called through one `collective_rpc`, which runs between two engine steps: to a request a swap is atomic.
`load_weights` alone would fail, because linear weights are packed into oneDNN handles and have no elements left; so the
whole of vLLM's layer-wise reload runs inside the one call. A malformed file would leave the target's shared embedding
without storage, which is why everything is checked before the first module is touched.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from models.drafting.lookup import NgramIndex
from models.engines.vllm import patches
from models.engines.vllm.capture import Claim, Ring
from models.engines.vllm.patches import last_tap, small_batch_gemm, switch
from models.engines.vllm.patches.proposer import Planned

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]  # the base of the other

# Name of a parameter of the engine's draft, to the file's tensors that it is stacked of.
Parameters = dict[str, tuple[str, ...]]
# Attributes of vLLM's: of its proposer, of P-EAGLE's module, and of DFlash's.
STATE, MASK, GAINS = "parallel_drafting_hidden_state_tensor", "mask_hidden", "_k_norm_weights"


def answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a refusal as an answer, because an exception in a worker's method reads like a broken engine."""

    @wraps(method)
    def answer(self: "DraftWorker", *args: Any) -> dict[str, Any]:
        try:
            return {"value": method(self, *args)}
        except (ValueError, OSError, SafetensorError) as error:
            return {"refused": str(error)}

    return answer


class DraftWorker(Worker):
    """vLLM's worker, by `worker_cls`, with vLLM's inside changed for what it is to do.

    Attributes:
        planned: what follows the scheduler's plans; None where vLLM's own proposer drafts the same number in each step.
    """

    vllm_config: Any
    model_runner: Any
    planned: Planned | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class; no model is loaded yet, and vLLM's platform has put its own kernels in place."""
        patches.install("worker")
        super().__init__(*args, **options)

    @answering
    def runner(self) -> str:
        """Return the class of vLLM's model runner; ValueError if it is not one that this worker can steer."""
        runner = self.model_runner
        name = f"{type(runner).__module__}.{type(runner).__qualname__}"
        if not isinstance(runner, GPUModelRunner):
            raise ValueError(f"vLLM runs {name}; drafts are swapped and switched off in its V1 model runner only")
        if self.get_draft_model() is not None:
            patches.require(runner, *switch.SWITCH)
            if not self.vllm_config.speculative_config.uses_draft_kv_cache():  # so no sequence is too long for it
                switch.draft_at_any_length(runner)
        return name

    @answering
    def small_batch_limit(self) -> int:
        """Return up to how many rows products read the grid of the target's weights; 0 if there is none."""
        return small_batch_gemm.limit()

    @answering
    def follow_plans(self) -> None:
        """Let the draft follow the scheduler's plans; ValueError if vLLM's proposer has another layout than wanted."""
        lookup = self.vllm_config.additional_config.lookup
        self.planned = Planned(self.model_runner, NgramIndex(lookup.shortest, lookup.longest, lookup.remembered))
        switch.draft_at_any_length(self.model_runner)  # the scheduler says which sequences are at its end

    @answering
    def forget_answers(self) -> int:
        """Forget what look-up remembers of answers; return how many tokens that was, 0 where nothing is looked up."""
        return 0 if self.planned is None else self.planned.library.forget()

    @answering
    def capture_states(self, max_bytes: int) -> int:
        """Hold the hidden states of requests that want it; return how many values a token has.

        Raises:
            ValueError: those of the target's last layer are not at hand.
        """
        layers = last_tap.tapped_layers(self.get_model())
        last = self.vllm_config.model_config.hf_text_config.num_hidden_layers
        if last not in layers:
            raise ValueError(f"the target hands out its layers {layers} to the draft and not its last, {last}")
        if self.rank == 0 and self.planned is not None:  # every rank has them all
            self.planned.ring = Ring(layers, max_bytes)
        return len(layers) * int(self.vllm_config.model_config.get_hidden_size())

    @answering
    def settle_states(self, claims: Sequence[Claim]) -> dict[str, int]:
        """Write or drop the states of requests that have ended; see `Ring.settle`."""
        ring = None if self.planned is None else self.planned.ring
        return {} if ring is None else ring.settle(Claim(*claim) for claim in claims)

    @answering
    def swap_draft(self, path: str, parameters: Parameters) -> int:
        """Load a draft; return how many tensors were loaded.

        Args:
            path: a safetensors file.
            parameters: the draft's parameters in the engine, by what they are made of; see
                `models.drafts.EngineWeights`.

        Raises:
            ValueError: names, shapes or dtypes differ from the draft that the engine started with, or a value is not
            finite.
        """
        draft, shared = self._draft(), self._shared(parameters)
        weights = _without(load_file(path), shared)
        self._require_like_start(weights, shared)
        config = self.vllm_config.speculative_config.draft_model_config
        with set_current_vllm_config(self.vllm_config), torch.no_grad(), small_batch_gemm.loading_draft():
            initialize_layerwise_reload(draft)
            draft.load_weights(iter(weights.items()))
            finalize_layerwise_reload(draft, config)
            targets = self._targets()
            for module in draft.modules():  # a packed output layer keeps its old copy otherwise
                if isinstance(module, ParallelLMHead) and id(module) not in targets:
                    quant_method: Any = module.quant_method
                    quant_method.process_weights_after_loading(module)
            for name, parts in parameters.items():
                module, leaf = self._place(name)
                if leaf in module._buffers:  # the reload puts back what was there before
                    getattr(module, leaf).copy_(weights[parts[0]])
            derive(self.model_runner.drafter)
        return len(weights)

    @answering
    def parameter_error(self, path: str, name: str, parts: Sequence[str]) -> float:
        """Compare what a loaded module computes with what the file says it should.

        Packed weights can't be read back, so a linear layer answers fixed random inputs, and the answer is held against
        the product with the file's matrix. Gains, biases, maps of token ids and learnt vectors are compared as they
        are.

        Args:
            path: a safetensors file.
            name: of the engine's parameter.
            parts: the file's tensors that it is stacked of.

        Returns:
            max |got − wanted| / max |wanted|; infinite where it computes what is not finite, 0 for a target's module.

        Raises:
            ValueError: the engine's draft has no such parameter.
        """
        module, leaf = self._place(name)
        if id(module) in self._targets():
            return 0.0
        with safe_open(path, "pt") as file:
            wanted = torch.cat([file.get_tensor(part) for part in parts])
        if not wanted.is_floating_point():
            return float((getattr(module, leaf).cpu() != wanted).any())
        if wanted.ndim == 1 or leaf in module._buffers:
            return relative(getattr(module, leaf).detach().float().cpu(), wanted.float())
        dtype = self.vllm_config.model_config.dtype
        errors = []
        for num_rows in (1, small_batch_gemm.limit() + 4):  # products of few rows read other weights than those of many
            inputs = torch.randn(num_rows, wanted.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
            with torch.no_grad():
                got = _product(module, inputs.to(self.device)).cpu()
            errors.append(relative(got.float()[:, : wanted.shape[0]], inputs.float() @ wanted.float().T))
        return max(errors)

    @answering
    def derived_errors(self, path: str) -> dict[str, float]:
        """Compare what vLLM computed from weights when they were loaded in the same way; see `derive`."""
        return derived_errors(self.model_runner.drafter, load_file(path))

    @answering
    def set_speculation(self, on: bool) -> None:
        """Draft or don't. Off, no draft runs and the scheduler gets no drafted tokens, so a step is a plain one.

        Positions passed meanwhile have no draft keys: requests in flight accept less for a while after switching on,
        their output is the same. Cached blocks: see `scheduler.DraftKeys`.
        """
        switch.turn(self.model_runner, on)

    def _draft(self) -> Any:
        draft = self.get_draft_model()
        if draft is None:
            raise ValueError("this engine was started without a draft")
        return draft

    def _place(self, parameter: str) -> tuple[Any, str]:
        """Return the draft's module that holds a parameter, and the parameter's name in it."""
        path, _, leaf = parameter.rpartition(".")
        module = dict(self._draft().named_modules(remove_duplicate=False)).get(path)
        if getattr(module, leaf, None) is None:
            raise ValueError(f"the engine's draft has no parameter {parameter}")
        return module, leaf

    def _shared(self, parameters: Parameters) -> set[str]:
        """Return the file's tensors whose module is the target's own; writing through it would change the target."""
        targets = self._targets()
        return {part for name, parts in parameters.items() if id(self._place(name)[0]) in targets for part in parts}

    def _targets(self) -> set[int]:
        """Return the identities of the target's modules, some of which a draft may share."""
        return {id(module) for module in self.get_model().modules()}

    def _require_like_start(self, weights: dict[str, Tensor], shared: set[str]) -> None:
        if not hasattr(self, "_wanted"):
            start = Path(self.vllm_config.speculative_config.draft_model_config.model)
            self._wanted: dict[str, Any] = {}
            for file in sorted(start.glob("*.safetensors")):
                tensors = _without(load_file(file), shared)
                self._wanted |= {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}
        got = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}
        for name in sorted(got.keys() | self._wanted.keys()):
            if got.get(name) != self._wanted.get(name):
                raise ValueError(f"tensor {name} is {got.get(name)}; the engine started with {self._wanted.get(name)}")
        for name, tensor in weights.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"tensor {name} holds NaN or infinite values")


def _without(weights: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name not in names}


def _product(module: Any, inputs: Tensor) -> Tensor:
    """Return [N, O] of inputs [N, I], without the bias; Medusa's blocks are plain torch, all else is vLLM's."""
    product: Tensor
    if isinstance(module, nn.Linear):
        product = functional.linear(inputs, module.weight)
    else:
        product = module.quant_method.apply(module, inputs, bias=None)
    return product


def derive(drafter: Any) -> None:
    """Compute anew what vLLM computes from a draft's weights when it loads them, and keeps beside its modules.

    A swap replaces the modules' weights; what was computed from the ones before would stay, and nobody would notice but
    by acceptance. Tried with vLLM 0.32: P-EAGLE's state of the masked places (v1/spec_decode/llm_base_proposer.py,
    load_model), and DFlash's stacked gains of keys (model_executor/models/qwen3_dflash.py, _build_fused_kv_buffers).
    """
    if (state := getattr(drafter, STATE, None)) is not None:
        state.copy_(_state(drafter.model))
    if (inner := _stacking(drafter)) is not None:
        inner._build_fused_kv_buffers()


def derived_errors(drafter: Any, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare what `derive` computes with a file's weights.

    Returns:
        max |got − wanted| / max |wanted| by a name; empty where nothing is kept.
    """
    found = {}
    if (state := getattr(drafter, STATE, None)) is not None:
        wanted = weights["fc.weight"].float() @ weights[MASK].float().flatten()
        found[STATE] = relative(state.detach().float().cpu(), wanted)
    if (inner := _stacking(drafter)) is not None:
        gains = [weights[f"layers.{number}.self_attn.k_norm.weight"].float() for number in range(len(inner.layers))]
        found[GAINS] = relative(getattr(inner, GAINS).detach().float().cpu(), torch.stack(gains))
    return found


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return max |got − wanted| / max |wanted|; infinite where something computed is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")  # finite weights can overflow; a NaN here would lose every comparison
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


@torch.no_grad()
def _state(model: Any) -> Tensor:
    """Return [H] what the masked places of P-EAGLE read in place of the target's states."""
    state: Tensor = model.combine_hidden_states(getattr(model, MASK).view(-1))
    return state


def _stacking(drafter: Any) -> Any:
    """Return DFlash's inner module, None in another proposer."""
    inner = getattr(getattr(drafter, "model", None), "model", None)
    return inner if hasattr(inner, GAINS) else None
