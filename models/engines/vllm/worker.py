"""vLLM's worker, and what redraft's own engine adds to `redraft_vllm`: plans, captured states, a switch.

Every method is called through one `collective_rpc`, which runs between two engine steps: to a request a swap is atomic.
How a draft is read, checked and replaced is in `redraft_vllm/`, which stock servers use as well.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from models.core.drafting.lookup import NgramIndex
from models.engines.vllm import patches
from models.engines.vllm.capture import Claim, Ring
from models.engines.vllm.patches import last_tap, small_batch_gemm, switch
from models.engines.vllm.redraft_vllm.swap import Parameters, WorkerDraft
from models.engines.vllm.redraft_vllm.worker import DraftExtension

if TYPE_CHECKING:
    from models.engines.vllm.patches.proposer import Planned
if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]  # the base of the other


def answering(method: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """Return a refusal as an answer, because an exception in a worker's method reads like a broken engine."""

    @wraps(method)
    def answer(self: "DraftWorker", *args: Any) -> dict[str, Any]:
        try:
            return {"value": method(self, *args)}
        except (ValueError, OSError, ImportError) as error:
            return {"refused": str(error)}

    return answer


class DraftOnGrids(WorkerDraft):
    """The draft of a worker whose products of few rows may read other weights than those of many."""

    def load(self, weights: Mapping[str, Tensor], parameters: Parameters) -> int:
        """See the base class."""
        with small_batch_gemm.loading_draft():
            return super().load(weights, parameters)

    def parameter_error(
        self, weights: Mapping[str, Tensor], name: str, parts: Sequence[str], row_counts: Sequence[int] = ()
    ) -> float:
        """See the base class."""
        return super().parameter_error(weights, name, parts, row_counts or (1, small_batch_gemm.limit() + 4))


class DraftWorker(DraftExtension, Worker):
    """vLLM's worker, by `worker_cls`, with vLLM's inside changed for what it is to do.

    Attributes:
        planned: what follows the scheduler's plans; None where vLLM's own proposer drafts the same number in each step.
    """

    vllm_config: Any
    model_runner: Any
    planned: "Planned | None" = None
    _is_plain: bool = False  # whether the step at hand is
    _step: Any = None  # what is drafted after it: a `StepPlan`, or a number

    def __init__(self, *args: Any, **options: Any) -> None:
        """See the base class; no model is loaded yet, and vLLM's platform has put its own kernels in place."""
        patches.install("worker")
        super().__init__(*args, **options)

    def execute_model(self, scheduler_output: Any) -> Any:
        """See the base class; a step without a draft is run as by an engine without one."""
        self._is_plain = switch.is_plain(self.model_runner, scheduler_output)
        self._step = scheduler_output.num_spec_tokens_to_schedule
        with switch.without_draft(self.model_runner) if self._is_plain else nullcontext():
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See the base class."""
        with switch.without_draft(self.model_runner) if self._is_plain else nullcontext():
            output = super().sample_tokens(grammar_output)
        if self._is_plain and self.planned is not None:
            self.planned.look_up_alone(self._step)
        return output

    @cached_property
    def _redraft_draft(self) -> WorkerDraft:
        return DraftOnGrids(self)

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
    def require_batch_invariant(self) -> None:
        """Raise ValueError if the target has a layer whose rows depend on others."""
        from models.engines.vllm.patches import batch_invariance  # which needs vLLM's layers, wherever they lie

        batch_invariance.require(self.get_model())

    @answering
    def follow_plans(self) -> None:
        """Let the draft follow the scheduler's plans; ValueError if vLLM's proposer has another layout than wanted."""
        from models.engines.vllm.patches.proposer import Planned  # which needs vLLM's proposer, wherever that lies

        lookup = self.vllm_config.additional_config.lookup
        self.planned = Planned(self.model_runner, NgramIndex(lookup.shortest, lookup.longest, lookup.remembered))
        switch.draft_at_any_length(self.model_runner)  # the scheduler says which sequences are at its end

    @answering
    def forget_answers(self) -> int:
        """Forget what look-up remembers of answers; return how many tokens that was, 0 where nothing is looked up."""
        return 0 if self.planned is None else self.planned.library.forget()

    @answering
    def capture_states(self, max_bytes: int) -> int:
        """Hold the hidden states of requests that want it; return how many values a token has."""
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
    def set_speculation(self, on: bool) -> None:
        """Draft or don't. Off, a step is plain, and its positions get no draft keys; see `scheduler.DraftKeys`."""
        switch.turn(self.model_runner, on)
