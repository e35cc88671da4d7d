"""Let the target hand out its last residual stream beside those that the draft reads, where states are captured.

Training needs that stream, which gives the target's logits. Which streams the target hands out is compiled into it, so
this is settled when the model is loaded.

Replaces: `vllm.v1.worker.gpu_model_runner.GPUModelRunner._setup_eagle3_aux_hidden_state_outputs`.
Tried with: vLLM 0.32.
No hook: a draft's config names the streams, and they are what the draft reads; nothing names one that it does not.
Without it: nothing is captured beside a head that others trained, which reads layers 2, n // 2 and n − 3 of n as a
    rule: what the target returns is normed, from which the stream can't be had.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from models.engines.vllm.fields import NUM_READ
from models.engines.vllm.patches import replace


def install() -> None:
    """Let vLLM's runners do so; called before a model is loaded."""
    replace(GPUModelRunner, "_setup_eagle3_aux_hidden_state_outputs", _set_up)


def tapped_layers(model: Any) -> list[int]:
    """Return which residual streams a target hands out, counted as layers done, ascending."""
    return sorted(getattr(getattr(model, "model", None), "aux_hidden_state_layers", ()))


def _set_up(own: Callable[[Any], None], runner: Any) -> None:
    own(runner)
    layers = tapped_layers(runner.get_model())
    last = runner.model_config.hf_text_config.num_hidden_layers
    if getattr(runner.vllm_config.additional_config, "captures", False) and layers and last not in layers:
        runner.model.set_aux_hidden_state_layers((*layers, last))
        setattr(runner, NUM_READ, len(layers))
