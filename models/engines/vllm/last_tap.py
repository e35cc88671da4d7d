"""Let the target hand out its last residual stream beside those that the draft reads, where states are captured.

Training needs that stream, which gives the target's logits. A head that others trained reads layers 2, n // 2 and n − 3
of n as a rule, and what the target returns is normed, from which the stream can't be had. Which streams it hands out is
compiled into it, so this is settled when the model is loaded.
"""

from functools import wraps
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

# Of the runner: how many streams the draft reads, where the target hands out one more.
NUM_READ = "redraft_num_read"


def install() -> None:
    """Let vLLM's runners do so; called before a model is loaded."""
    own = GPUModelRunner._setup_eagle3_aux_hidden_state_outputs
    if hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def set_up(self: Any) -> None:
        own(self)
        layers = tapped_layers(self.get_model())
        last = self.model_config.hf_text_config.num_hidden_layers
        if getattr(self.vllm_config.additional_config, "captures", False) and layers and last not in layers:
            self.model.set_aux_hidden_state_layers((*layers, last))
            setattr(self, NUM_READ, len(layers))

    GPUModelRunner._setup_eagle3_aux_hidden_state_outputs = set_up  # type: ignore[method-assign]  # vLLM has no hook


def tapped_layers(model: Any) -> list[int]:
    """Return which residual streams a target hands out, counted as layers done, ascending."""
    return sorted(getattr(getattr(model, "model", None), "aux_hidden_state_layers", ()))
