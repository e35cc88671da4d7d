"""The production engine: vLLM's AsyncLLM with a draft that can be replaced while it serves.

All of vLLM comes into redraft through this package. Importing it starts nothing and imports no vLLM; `VllmEngine.start`
does.
"""

import math
import os
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from models import catalog
from models.engines import Engine, EngineParams, LookUp, Rules
from models.engines.vllm.installed import engine_arguments, hands_out_states, tool_parsers
from models.lengths import goodput
from models.params import BaseParams, did_you_mean, require_unsaid

if TYPE_CHECKING:
    from models.serving import Serve

PAPER = "arXiv:2309.06180"
# Whether a sequence's keys are divided among threads, by how many rows attend at once: then their bits differ.
SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
# Keys that only a planned step reads.
PLANNED_BY = ("lookup", "lengths")
_TARGET = "the recipe's [target] says which model and tokenizer"
_SAME = "set the key of that name in [engine]"
_SPECULATION = "set num_draft_tokens and draft_sample_method in [engine]"
_OWN = "drafts are swapped and accepted tokens are counted through it"
_TURNS = "what checks a draft goes before traffic or after it"
_SERVE = "it is the endpoint's; set tool_parser in [serve]"
# Engine arguments that have one place to be set already, or that would break what this package promises.
OWNED = {
    **dict.fromkeys(("model", "model_weights", "hf_config_path", "revision", "code_revision"), _TARGET),
    **dict.fromkeys(("tokenizer", "tokenizer_revision", "skip_tokenizer_init"), _TARGET),
    **dict.fromkeys(("dtype", "max_model_len", "max_num_seqs", "enforce_eager"), _SAME),
    **dict.fromkeys(("spec_method", "spec_model", "spec_tokens"), _SPECULATION),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "scheduler_cls", "distributed_executor_backend"), _OWN),
    **dict.fromkeys(("async_scheduling", "disable_log_stats"), _OWN),
    "additional_config": "what the scheduler plans by is handed over in it",
    "scheduling_policy": _TURNS,
    **dict.fromkeys(("enable_auto_tool_choice", "tool_call_parser"), _SERVE),
    "served_model_name": "the service names the model",
    "trust_remote_code": "code out of a model's directory is never run",
    "logits_processors": "speculation does not honour them",
}


class Params(EngineParams):
    """How the engine runs.

    Attributes:
        max_num_seqs: sequences decoded at once.
        dtype: "auto" takes bfloat16 where the processor multiplies it natively.
        enforce_eager: start in 20–30 s without compiling, and with the products of `linear_kernels`; "auto" compiles
            what serves, see models/engines/vllm/measuring.py.
        kv_cache_gib: memory for keys and values (CPU).
        draft_sample_method: "probabilistic" draws drafted tokens from q and accepts more at temperature > 0.
        plan_steps: whether each step is drafted as is expected to be fastest; "auto" does so on a CPU. Else vLLM drafts
            by itself, the same number of tokens in each step. On a GPU, planning takes vLLM's V1 runner, unpadded
            batches and synchronous scheduling; it was not run on one.
        lookup: what is looked up beside the draft.
        lengths: the policy that says how many tokens are drafted in a step, K at most.
        extra: further vLLM engine arguments, passed through; none of OWNED, and `speculative_config`, for a way of
            drafting that is vLLM's own, only where num_draft_tokens is 0.
    """

    name: Literal["vllm"] = "vllm"
    max_num_seqs: int = Field(32, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    enforce_eager: bool | Literal["auto"] = "auto"
    kv_cache_gib: int = Field(1, ge=1)
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    plan_steps: bool | Literal["auto"] = "auto"
    lookup: LookUp = LookUp()
    lengths: Annotated[BaseParams, catalog.Method("lengths")] = goodput.Params()
    extra: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults

    @property
    def rules(self) -> Rules:
        """What vLLM verifies drafted tokens by."""
        return Rules(*(catalog.parse("verify", {"name": name}) for name in ("greedy", "rejection")))

    @property
    def num_devices(self) -> int:
        """Over how many GPUs it is spread, the first ones that it sees."""
        return math.prod(int(self.extra.get(f"{kind}_parallel_size") or 1) for kind in ("tensor", "pipeline", "data"))

    @field_validator("lengths")
    @classmethod
    def _plans_batches(cls, lengths: BaseParams) -> BaseParams:
        if not hasattr(catalog.load("lengths", lengths.name), "plan"):
            raise ValueError(f"length policy {lengths.name} looks at one sequence; it can't plan the steps of a batch")
        return lengths

    @field_validator("extra")
    @classmethod
    def _are_arguments_to_pass(cls, extra: dict[str, Any]) -> dict[str, Any]:
        known = engine_arguments()
        for name in extra:
            if name in OWNED:
                raise ValueError(f'argument "{name}" can\'t be passed to the engine: {OWNED[name]}')
            if known is not None and name not in known:
                near = get_close_matches(name, known - OWNED.keys(), n=3)  # all of them would fill a screen
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise ValueError(f'vLLM\'s engine has no argument "{name}"{hint}')
        return extra

    @model_validator(mode="after")
    def _drafts_in_one_way(self) -> Self:
        if self.plan_steps is False:
            require_unsaid(self, PLANNED_BY, "[engine]", "plan_steps is false")
        if self.num_draft_tokens and "speculative_config" in self.extra:
            raise ValueError(
                f'argument "speculative_config" can\'t be passed to the engine: {_SPECULATION}, or num_draft_tokens '
                f"to 0; got {self.num_draft_tokens}"
            )
        return self


def child_environment(params: Params | None = None) -> dict[str, str]:
    """Return the variables that a process must be started with to run this engine on a CPU."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": str((params or Params()).kv_cache_gib),
        # "auto" binding leaves the worker one core of two.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        SPLIT_KV: "0",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
    }


def require_draft(draft: BaseParams, params: Params) -> None:
    """Raise ValueError if vLLM can't draft with a family, or not with drafts that are made so, or in other ways."""
    family = catalog.load("drafts", draft.name)
    if not family.SERVED:
        why = f": {family.UNSERVED}" if hasattr(family, "UNSERVED") else ""
        raise ValueError(f'engine "vllm" can\'t draft with family {draft.name}; engine "torch" can{why}')
    if hasattr(family, "require_served"):
        family.require_served(draft, params.num_draft_tokens)
    if getattr(family, "FIXED_K", False):
        why = f"vLLM drafts the same number of tokens in each step with family {draft.name}, and looks nothing up"
        require_unsaid(params, ("lookup", "lengths", "draft_sample_method"), "[engine]", why)


def require_target(architecture: str, config: Any, draft: BaseParams, params: Params) -> None:
    """Raise ValueError if the target reads fewer tokens than it is to, or vLLM's class of it hands out no states."""
    longest = getattr(config, "max_position_embeddings", None)
    rotation = getattr(config, "rope_parameters", None) or {}
    if longest and rotation.get("rope_type", "default") == "default" and params.max_model_len > longest:
        raise ValueError(f"[engine] max_model_len is {params.max_model_len}; the target reads {longest} tokens at most")
    if not hasattr(draft, "aux_layers") or params.extra.get("model_impl") == "transformers":
        return
    if hands_out_states(architecture) is False:
        raise ValueError(
            f"a draft of family {draft.name} reads states of the target's layers, and vLLM's {architecture} hands out "
            "none (it has no SupportsEagle3); choose a family that reads none, such as ngram"
        )


def require_serving(serve: "Serve", draft: BaseParams) -> None:
    """Raise ValueError if the endpoint has no such tool parser, or no hidden states can be captured."""
    if serve.tool_parser:
        require_tool_parser(serve.tool_parser)
    if serve.capture.is_on and not hasattr(draft, "aux_layers"):
        raise ValueError(f"[serve] capture: a draft of family {draft.name} reads no layers of the target to be kept")


def require_tool_parser(name: str) -> None:
    """Raise ValueError if the endpoint has no such parser of tool calls; without vLLM installed any name is taken."""
    known = tool_parsers()
    if known is not None and name not in ("auto", *known):
        raise ValueError(f'vLLM has no tool_parser "{name}"{did_you_mean(name, known)}')


async def start(
    target: Path,
    draft: Path | None,
    params: Params,
    served_name: str = "target",
    draft_version: str = "",
    costs: Path | None = None,
) -> Engine:
    """See `VllmEngine.start`; vLLM takes seconds to import, so that happens here."""
    from models.engines.vllm.engine import VllmEngine
    from models.engines.vllm.measuring import measure

    engine = await VllmEngine.start(target, draft, params, served_name, draft_version, costs)
    if costs is not None:
        await measure(engine)
    return engine
