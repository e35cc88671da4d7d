"""The reference engine: every draft family, verification rule and length policy, in one process and without vLLM.

Requests take turns step by step, one sequence a step, so it is right and easy to follow rather than made for load. A
swap happens between two steps; drafters in flight go on with the new weights and their old cache, which costs
acceptance only.

Steps run in the event loop's own thread. Each thread that multiplies has OpenMP workers of its own, and once they are
more than cores, libgomp puts them to sleep between any two products: a step would take half as long again.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from models import catalog
from models.core.drafting.draft_families import class_of, family_named, family_of, open_draft
from models.core.drafting.self_draft import TargetRunner
from models.core.layers.decoder import Decoder, require_known
from models.core.layers.kernels import fast_dtype
from models.core.learning import fitted
from models.core.throughput.cost import Cost, Time
from models.drafts import Draft
from models.engines import Completion, EngineParams, LookUp, OnFirstToken, Rules, Sampling
from models.engines.torch.request import Joined, Overlapped, Request, Took
from models.lengths import fixed
from models.params import BaseParams, require_unsaid
from models.targets import describe, stop_ids
from models.trees import chain
from models.verify import greedy, rejection

PAPER = "arXiv:2211.17192, algorithm 1"
FACTORS = True  # layers of low rank may be stored as two matrices


class Params(EngineParams):
    """How the engine runs.

    Attributes:
        dtype: "auto" takes bfloat16 where the processor multiplies it natively.
        device: as torch names it.
        verify: the rule for temperature > 0.
        verify_greedy: the rule for temperature 0; it sees logits in place of p, and mostly no q.
        lengths: the length policy.
        trees: what is proposed side by side, by drafts of families that can go on from any node of a tree.
        lookup: what is looked up beside the draft, for requests whose `drafting` is "auto"; nothing unless it says so.
        nested_confidence: with a draft in which others are nested, the smallest of them says each token of which its
            likeliest is at least so probable; else the next larger one does. None asks the whole draft alone.
    """

    name: Literal["torch"] = "torch"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    verify: Annotated[BaseParams, catalog.Method("verify")] = rejection.Params()
    verify_greedy: Annotated[BaseParams, catalog.Method("verify")] = greedy.Params()
    lengths: Annotated[BaseParams, catalog.Method("lengths")] = fixed.Params()
    trees: Annotated[BaseParams, catalog.Method("trees")] = chain.Params()
    lookup: LookUp = LookUp(num_tokens=0)
    nested_confidence: float | None = Field(None, ge=0, le=1)

    @property
    def rules(self) -> Rules:
        """What drafted tokens are verified by."""
        return Rules(greedy=self.verify_greedy, sampling=self.verify)

    @field_validator("verify", "verify_greedy")
    @classmethod
    def _suits_its_temperature(cls, rule: BaseParams, info: ValidationInfo) -> BaseParams:
        samples = catalog.load("verify", rule.name).SAMPLES
        if info.field_name == "verify" and not samples:
            raise ValueError(f"verify rule {rule.name} is for greedy decoding only; it can't sample")
        if info.field_name == "verify_greedy" and samples:
            raise ValueError(f"verify_greedy rule {rule.name} wants probabilities, which temperature 0 has none of")
        return rule

    @model_validator(mode="after")
    def _one_of_them_ends_a_step(self) -> Self:
        lengths, branches = catalog.load("lengths", self.lengths.name), catalog.load("trees", self.trees.name).BRANCHES
        policy, tree = f"length policy {self.lengths.name}", f"tree {self.trees.name}"
        at_fault, overlaps = (tree if branches else policy), hasattr(lengths, "OVERLAPS")
        whole = self.nested_confidence is not None and (branches or overlaps)
        otherwise = self.lookup.num_tokens > 0 and (branches or not hasattr(lengths, "plan"))
        stops = branches and hasattr(lengths, "go_on")
        faults = {
            f"{policy} stops a chain where the draft is unsure; {tree} is no chain": stops,
            f"{policy} drafts a chain while the target reads; {tree} is no chain": branches and overlaps,
            f"nested_confidence is for chains after what is certain; {at_fault} always asks the whole draft": whole,
            f"look-up is joined to chains that a policy plans; {at_fault} does otherwise": otherwise,
        }
        _refuse(faults)
        if branches:
            _require_siblings(tree, self)
        return self


class TorchEngine:
    """A target and its draft."""

    def __init__(
        self, target: Decoder, target_dir: Path, draft: Draft | None, directory: Path | None, params: Params
    ) -> None:
        self.target, self._target_dir, self.loaded, self.params = target, target_dir, draft, params
        self.rules: dict[bool, tuple[ModuleType, BaseParams]] = {}  # by whether decoding is greedy, with their keys
        self._find_heads(directory)
        self.trees = _method("trees", params.trees)
        if draft is not None:
            if (last := max(draft.taps, default=0)) > target.num_layers:
                has = f"which has {target.num_layers} layers"
                raise ValueError(f"{type(draft).__name__} reads what layer {last} of the target puts out, {has}")
            _require(type(draft), bool(draft.nested), params)
        self._answers = Overlapped if hasattr(self.lengths[0], "OVERLAPS") else Request
        self.joined: Joined | None = None  # None where nothing is looked up
        if params.lookup.num_tokens:
            if draft is None:
                raise ValueError("look-up is joined to a draft; got none (families suffix and ngram look up alone)")
            self.joined = Joined(params.lookup, self.lengths, params.num_draft_tokens)
        self.cost = Cost()  # of the steps so far
        self.stops = stop_ids(target_dir)
        self.running: set[Request] = set()
        self.draft, self.draft_version = directory, ""  # where the loaded one lies, and what outputs call it
        self.speculating = draft is not None and params.num_draft_tokens > 0
        # Called once for every request that ended, aborted ones too; after every step but those that read a prompt.
        self.on_finish: Callable[[Completion, Sampling], None] | None = None  # must not block
        self.on_step: Callable[[Took], None] | None = None  # nor this

    @classmethod
    async def start(
        cls,
        target: Path,
        draft: Path | None,
        params: Params,
        served_name: str = "target",
        draft_version: str = "",
        costs: Path | None = None,
    ) -> "TorchEngine":
        """Load both models, ValueError if one can't be; no name is served, and nothing is planned by `costs`."""
        dtype = fast_dtype(params.device) if params.dtype == "auto" else getattr(torch, params.dtype)
        decoder = Decoder.load(target, dtype, params.device)
        opened = None if draft is None else open_for(decoder, draft, target)
        engine = cls(decoder, target, opened, draft, params)
        engine.draft_version = draft_version
        return engine

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, on_first_token: OnFirstToken | None = None
    ) -> Completion:
        """See `models.engines.Engine`."""
        limit = self.params.max_model_len
        if not 0 < len(prompt_ids) < limit:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens; wanted 1 to {limit - 1}")
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.max_tokens > 0):
            raise ValueError(f"wanted temperature from 0, top_p in (0, 1] and max_tokens from 1; got {sampling}")
        request = self._answers(self, prompt_ids, sampling, request_id)
        self.running.add(request)
        try:
            while request.finish_reason is None:
                request.step()
                if on_first_token is not None:
                    on_first_token()
                    on_first_token = None
                await asyncio.sleep(0)  # the others' turn
        finally:
            self.running.discard(request)
            request.end()
            if self.joined is not None:
                self.joined.library.close_all_but(one.request_id for one in self.running)
            completion = request.completion()
            if self.on_finish is not None and request.token_ids:
                self.on_finish(completion, sampling)
        return completion

    async def swap_draft(self, directory: Path, version: str) -> float:
        """See `models.engines.Engine`."""
        if self.loaded is None or self.draft is None:
            raise ValueError("this engine was started without a draft")
        started = time.monotonic()
        family_of(self.draft).check(directory, self.draft, describe(self._target_dir))
        opened = open_for(self.target, directory, self._target_dir)
        self.loaded, self.draft, self.draft_version = opened, directory, version
        self._find_heads(directory)
        if self.joined is not None:
            self.joined.acceptance.start({})  # of another draft
        for request in self.running:
            request.use(opened, version)
        return 1000 * (time.monotonic() - started)

    async def check_draft(self, directory: Path) -> float:
        """See `models.engines.Engine`."""
        if self.loaded is None:
            raise ValueError("this engine was started without a draft")
        wanted = open_draft(directory, self._target_dir).state_dict()
        for name, got in self.loaded.state_dict().items():
            if not torch.equal(got.cpu(), wanted[name]):
                raise ValueError(f"tensor {name} of the loaded draft differs from {directory.name}'s")
        return 0.0

    async def set_speculation(self, on: bool) -> None:
        """See `models.engines.Engine`."""
        if on and self.loaded is None:
            raise ValueError("speculation can't be switched on: the engine was started without a draft")
        self.speculating = on

    async def health(self) -> None:
        """Return; there is no process of its own that could be dead."""

    async def close(self) -> None:
        """Forget the models."""
        self.loaded = None

    def _find_heads(self, directory: Path | None) -> None:
        """Take over rules and length policy, with the heads that a draft's directory keeps for them."""
        for greedy_, params in ((True, self.params.verify_greedy), (False, self.params.verify)):
            self.rules[greedy_] = _method("verify", fitted.found("verify", params, directory))
        self.lengths = _method("lengths", fitted.found("lengths", self.params.lengths, directory))

    def took(self, step: Took) -> None:
        self.cost = self.cost.after(Time(1, step.num_rows, 0, 1000 * step.target_s))
        if step.num_passes:
            whole_ms = 1000 * (step.draft_s + step.target_s)
            self.cost = self.cost.after(Time(1, step.num_rows, step.num_passes, whole_ms))
        if self.on_step is not None:
            self.on_step(step)


start = TorchEngine.start


def child_environment(params: Params) -> dict[str, str]:
    """Return nothing; the engine takes its process as it is."""
    return {}


def require_draft(draft: BaseParams, params: Params) -> None:
    """Raise ValueError if drafts of a family can't be drafted with as is set, or if a key would be unread."""
    for family, method in (("lengths", params.lengths), ("verify", params.verify), ("verify", params.verify_greedy)):
        module = catalog.load(family, method.name)
        require_unsaid(method, getattr(module, "FITS", ()), method.name, "only fitting reads it; set it in [distill]")
        if not params.lookup.num_tokens:
            require_unsaid(method, getattr(module, "PLANS", ()), method.name, "steps without look-up go unplanned")
    kind, policy = class_of(family_named(draft.name)), params.lengths.name
    _require(kind, bool(getattr(draft, "nested", ())), params)
    if hasattr(catalog.load("lengths", policy), "go_on") and not kind.asks:
        raise ValueError(f"{kind.__name__} drafts in one go; length policy {policy} would never be asked")


def require_target(architecture: str, config: Any, draft: BaseParams, params: Params) -> None:
    """Raise ValueError if the forward pass does not know the target."""
    try:
        require_known(config)
    except ValueError as error:
        raise ValueError(f'engine "torch" can\'t run the target: {error}; engine "vllm" runs other models') from error


def require_serving(serve: BaseModel, draft: BaseParams) -> None:
    """Raise ValueError: this engine is behind no endpoint."""
    raise ValueError('engine "torch" has no endpoint: leave out [serve] and [demo], or set [engine] name = "vllm"')


def _require(draft: type[Draft], has_nested: bool, params: Params) -> None:
    name, lengths = draft.__name__, catalog.load("lengths", params.lengths.name)
    if draft.branches:
        _require_siblings(name, params)
    why = "runs layers of the target" if draft.expands else "can't go on from tokens that are not certain"
    grows = catalog.load("trees", params.trees.name).BRANCHES and not draft.expands
    lone = params.nested_confidence is not None and not has_nested
    overlaps = hasattr(lengths, "OVERLAPS") and (not draft.expands or issubclass(draft, TargetRunner))
    own = params.lookup.num_tokens > 0 and draft.num_vectors is not Draft.num_vectors
    faults = {
        f"{name} can't go on from any node of a tree; wanted trees = chain for it": grows,
        f"{name} has no other drafts nested in it, which nested_confidence chooses between; leave it out": lone,
        f"length policy {params.lengths.name} drafts while the target reads; {name} {why}": overlaps,
        f"{name} has the target read vectors of its own beside what it proposes; look-up can't be joined to it": own,
    }
    _refuse(faults)


def _refuse(faults: dict[str, bool]) -> None:
    """Raise ValueError with the first fault that there is."""
    if fault := next((fault for fault, is_there in faults.items() if is_there), ""):
        raise ValueError(fault)


def _method(family: str, params: BaseParams) -> tuple[ModuleType, BaseParams]:
    return catalog.load(family, params.name), params


def _require_siblings(proposer: str, params: Params) -> None:
    """Raise ValueError if a rule can't judge siblings that are the likeliest tokens, as those of `proposer` are."""
    for key, rule in (("verify", params.verify), ("verify_greedy", params.verify_greedy)):
        drawn = catalog.load("verify", rule.name).SIBLINGS
        if "certain" not in drawn:
            raise ValueError(
                f"{proposer} proposes siblings that are certain; {key} rule {rule.name} wants {' or '.join(drawn)} ones"
            )


def open_for(decoder: Decoder, directory: Path, target_dir: Path) -> Draft:
    """Load a draft where a target's forward pass is, in its number format; raises what the family's `check` does."""
    return open_draft(directory, target_dir).to(decoder.device).pack(decoder.dtype)
