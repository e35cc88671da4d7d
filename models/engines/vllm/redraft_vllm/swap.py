"""The draft in a worker of vLLM's: what its file must hold, how it is replaced, whether it computes what a file says.

`load_weights` alone would fail on a CPU, because linear weights are packed into oneDNN handles and have no elements
left; so the whole of vLLM's layer-wise reload runs in one call, between two engine steps. A malformed file would leave
the target's shared embedding without storage, which is why everything is checked before the first module is touched.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

# Name of a parameter of the engine's draft, to the file's tensors that it is stacked of.
Parameters = Mapping[str, Sequence[str]]
Kind = tuple[tuple[int, ...], torch.dtype]
# Attributes of vLLM's: of its two model runners, of its proposer, of P-EAGLE's module, and of DFlash's.
DRAFTERS = ("drafter", "speculator")
STATE, MASK, GAINS = "parallel_drafting_hidden_state_tensor", "mask_hidden", "_k_norm_weights"
FUSED = (GAINS, "_fused_kv_weight", "_fused_kv_bias")


class WorkerDraft:
    """The draft of one worker, which holds a shard of it where the engine is tensor-parallel."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._wanted: dict[str, Kind] | None = None
        self._borrowed: dict[str, str] = {}  # sha256 of the start's tensors in whose place the target's are used

    def read_start(self) -> dict[str, Tensor]:
        """Return the tensors of the files that the engine was started with; ValueError if they are not in a folder."""
        start = Path(self._worker.vllm_config.speculative_config.draft_model_config.model)
        if not (files := sorted(start.glob("*.safetensors"))):
            raise ValueError(f"the engine's draft {start} is no folder with safetensors files")
        return {name: tensor for file in files for name, tensor in load_file(file).items()}

    def require_fit(self, weights: Mapping[str, Tensor], parameters: Parameters) -> None:
        """Check what can be checked without touching a module.

        Raises:
            ValueError: names, shapes or dtypes differ from the draft that the engine started with, a value is not
                finite, the engine's draft has no such parameter, or uses the target's in its place.
        """
        shared = self._shared(parameters)
        if self._wanted is None:
            start = self.read_start()
            self._wanted = kinds(start)
            self._borrowed = {name: _sha256(start[name]) for name in shared & start.keys()}
        wanted, got = self._wanted, kinds(weights)
        for name in sorted((got.keys() | wanted.keys()) - shared):
            if got.get(name) != wanted.get(name):
                raise ValueError(f"tensor {name} is {got.get(name)}; the engine started with {wanted.get(name)}")
        if missing := sorted({part for parts in parameters.values() for part in parts} - weights.keys() - shared):
            raise ValueError(f"the file has no tensor {', '.join(missing)}")
        for name in self._borrowed.keys() & got.keys():
            if _sha256(weights[name]) != self._borrowed[name]:
                raise ValueError(f"the engine's draft uses the target's {name}, and this one's is another")
        for name in got.keys() - shared:
            if weights[name].is_floating_point() and not bool(torch.isfinite(weights[name]).all()):
                raise ValueError(f"tensor {name} holds NaN or infinite values")

    def load(self, weights: Mapping[str, Tensor], parameters: Parameters) -> int:
        """Replace the draft's weights with those of a file that fits; return how many tensors were loaded."""
        draft, shared = self._module(), self._shared(parameters)
        loaded = {name: tensor for name, tensor in weights.items() if name not in shared}
        config = self._worker.vllm_config
        with set_current_vllm_config(config), torch.no_grad():
            initialize_layerwise_reload(draft)
            draft.load_weights(iter(loaded.items()))
            finalize_layerwise_reload(draft, config.speculative_config.draft_model_config)
            targets = self._targets()
            for module in draft.modules():  # a packed output layer keeps its old copy otherwise
                if isinstance(module, ParallelLMHead) and id(module) not in targets:
                    quant_method: Any = module.quant_method
                    quant_method.process_weights_after_loading(module)
            for name, parts in parameters.items():
                module, leaf = self._place(name)
                if leaf in module._buffers:  # the reload puts back what was there before
                    getattr(module, leaf).copy_(loaded[parts[0]])
            derive(self._drafter())
        return len(loaded)

    def parameter_error(
        self, weights: Mapping[str, Tensor], name: str, parts: Sequence[str], row_counts: Sequence[int] = (1, 64)
    ) -> float:
        """Compare what a loaded module computes with what the file says it should, in this worker's shard.

        Packed weights can't be read back, so a linear layer answers fixed random inputs, and the answer is held against
        the product with the file's matrix. Gains, biases, maps of token ids and learnt vectors are compared as they
        are.

        Args:
            weights: of the file, those of `parts` at least, which the engine's parameter `name` is stacked of.
            row_counts: how many inputs a layer answers at a time; kernels are chosen by it.

        Returns:
            max |got − wanted| / max |wanted|; infinite where it computes what is not finite, 0 for a target's module.
        """
        module, leaf = self._place(name)
        if id(module) in self._targets():
            return 0.0
        wanted = _shard(module, [weights[part] for part in parts])
        if not wanted.is_floating_point():
            return float((getattr(module, leaf).cpu() != wanted).any())
        if wanted.ndim == 1 or leaf in module._buffers:
            return relative(getattr(module, leaf).detach().float().cpu(), wanted.float())
        dtype = self._worker.vllm_config.model_config.dtype
        errors = []
        for num_rows in row_counts:
            inputs = torch.randn(num_rows, wanted.shape[1], generator=torch.Generator().manual_seed(0)).to(dtype)
            with torch.no_grad():
                got = _product(module, inputs.to(self._worker.device)).cpu()
            errors.append(relative(got.float()[:, : wanted.shape[0]], inputs.float() @ wanted.float().T))
        return max(errors)

    def derived_errors(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Compare what vLLM computed from weights when they were loaded in the same way; see `derive`."""
        return derived_errors(self._drafter(), weights)

    def _module(self) -> Any:
        draft = self._worker.get_draft_model()
        if draft is None:
            raise ValueError("this engine was started without a draft")
        return draft

    def _drafter(self) -> Any:
        """Return what proposes: vLLM's V1 model runner calls it drafter, V2, the default of a GPU, speculator."""
        runner = self._worker.model_runner
        return next(getattr(runner, name) for name in DRAFTERS if hasattr(runner, name))

    def _place(self, parameter: str) -> tuple[Any, str]:
        """Return the draft's module that holds a parameter, and the parameter's name in it."""
        path, _, leaf = parameter.rpartition(".")
        module = dict(self._module().named_modules(remove_duplicate=False)).get(path)
        if getattr(module, leaf, None) is None:
            raise ValueError(f"the engine's draft has no parameter {parameter}")
        return module, leaf

    def _shared(self, parameters: Parameters) -> set[str]:
        """Return the file's tensors whose module is the target's own; writing through it would change the target."""
        targets = self._targets()
        return {part for name, parts in parameters.items() if id(self._place(name)[0]) in targets for part in parts}

    def _targets(self) -> set[int]:
        """Return the identities of the target's modules, some of which a draft may share."""
        return {id(module) for module in self._worker.get_model().modules()}


def derive(drafter: Any) -> None:
    """Compute anew what vLLM computes from a draft's weights when it loads them, and keeps beside its modules.

    A swap replaces the modules' weights; what was computed from the ones before would stay, and nobody would notice but
    by acceptance. Tried with vLLM 0.32: P-EAGLE's state of the masked places (v1/spec_decode/llm_base_proposer.py,
    load_model), and DFlash's stacked gains of keys (model_executor/models/qwen3_dflash.py, _build_fused_kv_buffers).
    """
    if (state := getattr(drafter, STATE, None)) is not None:
        state.copy_(_state(drafter.model))
    if (inner := _stacking(drafter)) is not None:
        before = {name: getattr(inner, name, None) for name in FUSED}
        inner._build_fused_kv_buffers()
        for name, old in before.items():
            if old is not None:  # a CUDA graph that was captured reads where it lay
                setattr(inner, name, old.copy_(getattr(inner, name)))


def derived_errors(drafter: Any, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare what `derive` computes with a file's weights: max |got − wanted| / max |wanted|, by a name."""
    found = {}
    if (state := getattr(drafter, STATE, None)) is not None:
        wanted = weights["fc.weight"].float() @ weights[MASK].float().flatten()
        found[STATE] = relative(state.detach().float().cpu(), wanted)
    if (inner := _stacking(drafter)) is not None:
        gains = [weights[f"layers.{number}.self_attn.k_norm.weight"].float() for number in range(len(inner.layers))]
        found[GAINS] = relative(getattr(inner, GAINS).detach().float().cpu(), torch.stack(gains))
    return found


def kinds(weights: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Return name to shape and dtype."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


def relative(got: Tensor, wanted: Tensor) -> float:
    """Return max |got − wanted| / max |wanted|; infinite where something computed is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")  # finite weights can overflow; a NaN here would lose every comparison
    return float((got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def _shard(module: Any, parts: Sequence[Tensor]) -> Tensor:
    """Return this rank's part of what a module is stacked of, [O, I] or [O], as vLLM's loader cuts it."""
    if isinstance(module, QKVParallelLinear) and module.tp_size > 1:
        of_keys = module.tp_rank // module.num_kv_head_replicas
        heads = ((module.num_heads, module.tp_rank), *((module.num_kv_heads, of_keys),) * 2)
        cut = [_rows(part, num * module.head_size, rank) for part, (num, rank) in zip(parts, heads, strict=True)]
        return torch.cat(cut)
    if isinstance(module, ColumnParallelLinear) and module.tp_size > 1:
        return torch.cat([_rows(part, len(part) // module.tp_size, module.tp_rank) for part in parts])
    whole = torch.cat([*parts])
    if isinstance(module, RowParallelLinear) and module.tp_size > 1 and whole.ndim == 2:
        return whole.tensor_split(module.tp_size, dim=1)[module.tp_rank]
    if isinstance(module, VocabParallelEmbedding) and module.tp_size > 1:
        return whole[module.shard_indices.org_vocab_start_index : module.shard_indices.org_vocab_end_index]
    return whole


def _rows(part: Tensor, num_rows: int, rank: int) -> Tensor:
    return part[num_rows * rank : num_rows * (rank + 1)]


def _product(module: Any, inputs: Tensor) -> Tensor:
    """Return [N, O] of inputs [N, I], without the bias; Medusa's blocks are plain torch, all else is vLLM's."""
    if isinstance(module, nn.Linear):
        return functional.linear(inputs, module.weight)
    return cast("Tensor", module.quant_method.apply(module, inputs, bias=None))


@torch.no_grad()
def _state(model: Any) -> Tensor:
    """Return [H] what the masked places of P-EAGLE read in place of the target's states."""
    return cast("Tensor", model.combine_hidden_states(getattr(model, MASK).view(-1)))


def _stacking(drafter: Any) -> Any:
    """Return DFlash's inner module, None in another proposer."""
    inner = getattr(getattr(drafter, "model", None), "model", None)
    return inner if hasattr(inner, GAINS) else None
