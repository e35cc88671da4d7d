"""What vLLM computes from a draft's weights when it loads them, and keeps beside its modules.

A swap replaces the modules' weights; what was computed from the ones before would stay, and nobody would notice but by
acceptance. Tried with vLLM 0.32: P-EAGLE's state of the masked places (v1/spec_decode/llm_base_proposer.py,
load_model), and DFlash's stacked gains of keys (model_executor/models/qwen3_dflash.py, _build_fused_kv_buffers).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# Attributes of vLLM's: of its proposer, of P-EAGLE's module, and of DFlash's.
STATE, MASK, GAINS = "parallel_drafting_hidden_state_tensor", "mask_hidden", "_k_norm_weights"


def derive(drafter: Any) -> None:
    """Compute it anew, of the weights as they are now.

    Args:
        drafter: vLLM's proposer, of any kind.
    """
    if (state := getattr(drafter, STATE, None)) is not None:
        state.copy_(_state(drafter.model))
    if (inner := _stacking(drafter)) is not None:
        inner._build_fused_kv_buffers()


def errors(drafter: Any, weights: Mapping[str, Tensor]) -> dict[str, float]:
    """Compare it with a file's weights.

    Args:
        drafter: vLLM's proposer, of any kind.
        weights: of the file, by its names.

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
