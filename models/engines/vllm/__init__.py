"""The production engine: vLLM's AsyncLLM with a draft that can be replaced while it serves.

All of vLLM comes into redraft through this package. Importing it starts nothing and imports no vLLM; `VllmEngine.start`
does. What the installed vLLM offers is read off its source, since importing it takes seconds; the functions that do so
return None where it is not installed.
"""

import ast
import math
import os
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from models import catalog
from models.engines import Engine, EngineParams, LookUp, Rules
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
# Where vLLM's classes of models are, and the interface of those that hand out states of their layers.
MODELS, EAGLE3 = "model_executor/models", "SupportsEagle3"
TRANSFORMERS = "transformers"  # the module of the class that runs transformers' own


class Params(EngineParams):
    """How the engine runs.

    Attributes:
        max_num_seqs: sequences decoded at once.
        dtype: "auto" takes bfloat16 where the processor multiplies it natively.
        enforce_eager: start in 20–30 s without compiling, and with the products of `linear_kernels`; "auto" compiles
            what serves, see models/engines/vllm/measuring.py.
        kv_cache_gib: memory for keys and values (CPU).
        batch_invariant: whether a row of the target has the same bits whatever else is in its step, so that a greedy
            answer is the same at any load, drafted or not. On a CPU in bfloat16 by the kernels of `small_batch_gemm`,
            whose products with many rows take longer; on a GPU it is vLLM's own mode.
        draft_sample_method: "probabilistic" draws drafted tokens from q, in planned steps by the noise that the target
            draws by, and accepts more at temperature > 0; "auto" does so but where plan_steps is false on a CPU.
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
    batch_invariant: bool = False
    draft_sample_method: Literal["auto", "greedy", "probabilistic"] = "auto"
    plan_steps: bool | Literal["auto"] = "auto"
    lookup: LookUp = LookUp()
    lengths: Annotated[BaseParams, catalog.Method("lengths")] = goodput.Params()
    extra: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies defaults

    @property
    def rules(self) -> Rules:
        """What drafted tokens are verified by, where vLLM does not draft by itself."""
        greedy, coupled = (catalog.parse("verify", {"name": name}) for name in ("greedy", "coupled"))
        draws = self.draft_sample_method == "probabilistic" or (self.draft_sample_method == "auto" and self.plan_steps)
        return Rules(greedy, coupled, draws=bool(draws))

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
        known = offered_arguments()
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
    """Raise ValueError if the target reads fewer tokens than it is to, or vLLM's class lacks what a draft needs."""
    longest = getattr(config, "max_position_embeddings", None)
    rotation = getattr(config, "rope_parameters", None) or {}
    if longest and rotation.get("rope_type", "default") == "default" and params.max_model_len > longest:
        raise ValueError(f"[engine] max_model_len is {params.max_model_len}; the target reads {longest} tokens at most")
    if not hasattr(draft, "aux_layers"):
        return
    other = f"a draft of family {draft.name} reads {{}}; choose a family that reads no states, such as ngram"
    if params.extra.get("model_impl") == TRANSFORMERS or _is_transformers(architecture):
        if lacks := lacks_to_share(config):
            raise ValueError(other.format(f"the target's embedding, and vLLM runs {architecture} as {lacks}"))
    elif hands_out_states(architecture) is False:
        lacks = f"vLLM's {architecture} hands out none (it has no {EAGLE3})"
        raise ValueError(other.format(f"states of the target's layers, and {lacks}"))


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


@cache
def offered_arguments() -> frozenset[str] | None:
    """Return the names of vLLM's engine arguments."""
    if (tree := _parsed("engine/arg_utils.py")) is None:
        return None
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith("EngineArgs")]
    fields = (line.target for node in classes for line in node.body if isinstance(line, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name) and not field.id.startswith("_"))


@cache
def tool_parsers() -> frozenset[str] | None:
    """Return the names of the parsers of tool calls."""
    if (tree := _parsed("tool_parsers/__init__.py")) is None:
        return None
    tables = (node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    keys = (key for table in tables for key in table.keys)
    return frozenset(key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


@cache
def hands_out_states(architecture: str) -> bool | None:
    """Return whether vLLM's class of a target has the interface of EAGLE-3.

    What vLLM has no class for runs as transformers' own, in a class that has it.
    """
    if (places := _places()) is None:
        return None
    if architecture not in places:
        return True
    module, name = places[architecture]
    return _derives(module.removeprefix("vllm.") if "." in module else f"{MODELS.replace('/', '.')}.{module}", name)


def lacks_to_share(config: Any) -> str:
    """Return why a draft can't share the embedding of transformers' own class of a target; "" if it can.

    vLLM takes the module `embed_tokens` of it, and a draft was trained on vectors that no family has scaled.
    """
    import torch  # with transformers it takes seconds to import, and a recipe is parsed without them
    from transformers import AutoModel

    with torch.device("meta"):
        model = AutoModel.from_config(config)
    kind = type(getattr(model, "embed_tokens", None))
    if kind is torch.nn.Embedding:
        return ""
    has = "has no embed_tokens" if kind is type(None) else f"scales it in its {kind.__name__}"
    return f"transformers' {type(model).__name__}, which {has}"


def _is_transformers(architecture: str) -> bool:
    """Return whether vLLM runs a target's class as transformers has it."""
    places = _places()
    return places is not None and places.get(architecture, [TRANSFORMERS])[0] == TRANSFORMERS


@cache
def _places() -> dict[str, list[str]] | None:
    """Return architecture to module and class of vLLM's."""
    if (tree := _parsed(f"{MODELS}/registry.py")) is None:
        return None
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    return {
        key.value: [str(part.value) for part in place.elts if isinstance(part, ast.Constant)]
        for table in tables
        for key, place in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(key.value, str) and isinstance(place, ast.Tuple)
    }


def _derives(module: str, name: str) -> bool:
    """Return whether a class of a module of vLLM, there or where it is imported from, has the interface `EAGLE3`."""
    package, tree = module.split("."), _parsed(f"{module.replace('.', '/')}/__init__.py")
    if tree is None:
        package, tree = package[:-1], _parsed(f"{module.replace('.', '/')}.py")
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
            return EAGLE3 in bases or any(_derives(module, base) for base in bases)
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        place = node.module.removeprefix("vllm.")
        if node.level:
            place = ".".join([*package[: len(package) + 1 - node.level], place])
        if any((one.asname or one.name) == name and _derives(place, one.name) for one in node.names):
            return True
    return False


def _parsed(file: str) -> ast.Module | None:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], file)
    return ast.parse(path.read_bytes()) if path.is_file() else None
