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
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, Self

import torch
from pydantic import field_validator, model_validator
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from models import catalog
from models.cost import Cost, Time
from models.drafters import Expander, Observer, Remembering, SelfDrafter
from models.drafts import Draft, Drafter, GoOn, family_of, open_draft
from models.engines import Completion, EngineParams, Sampling
from models.layers.decoder import Cache, Decoder
from models.lengths import View, fixed
from models.params import BaseParams
from models.precision import fast_dtype
from models.proposal import Proposal
from models.targets import describe
from models.trees import chain
from models.verify import Rules, Verified, greedy, rejection

PAPER = "arXiv:2211.17192, algorithm 1"
FACTORS = True  # layers of low rank may be stored as two matrices

OnFinish = Callable[[Completion, Sampling], None]
OnStep = Callable[[float, float], None]


class Params(EngineParams):
    """How the engine runs.

    Attributes:
        dtype: "auto" takes bfloat16 where the processor multiplies it natively.
        device: as torch names it.
        verify: the rule for temperature > 0.
        verify_greedy: the rule for temperature 0; it sees logits in place of p, and mostly no q.
        lengths: the length policy.
        trees: what is proposed side by side, by drafts of families that can go on from any node of a tree.
    """

    name: Literal["torch"] = "torch"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "cpu"
    verify: Annotated[BaseParams, catalog.Method("verify")] = rejection.Params()
    verify_greedy: Annotated[BaseParams, catalog.Method("verify")] = greedy.Params()
    lengths: Annotated[BaseParams, catalog.Method("lengths")] = fixed.Params()
    trees: Annotated[BaseParams, catalog.Method("trees")] = chain.Params()

    @property
    def rules(self) -> Rules:
        """What drafted tokens are verified by."""
        return Rules(greedy=self.verify_greedy, sampling=self.verify)

    @field_validator("verify")
    @classmethod
    def _samples(cls, rule: BaseParams) -> BaseParams:
        if not catalog.load("verify", rule.name).SAMPLES:
            raise ValueError(f"verify rule {rule.name} is for greedy decoding only; it can't sample")
        return rule

    @field_validator("verify_greedy")
    @classmethod
    def _reads_logits(cls, rule: BaseParams) -> BaseParams:
        if catalog.load("verify", rule.name).SAMPLES:
            raise ValueError(f"verify_greedy rule {rule.name} wants probabilities, which temperature 0 has none of")
        return rule

    @model_validator(mode="after")
    def _one_of_them_ends_a_step(self) -> Self:
        tree, lengths = catalog.load("trees", self.trees.name), catalog.load("lengths", self.lengths.name)
        if tree.BRANCHES and hasattr(lengths, "go_on"):
            raise ValueError(
                f"length policy {self.lengths.name} stops a chain where the draft is unsure; tree {self.trees.name} "
                "is no chain"
            )
        return self


class TorchEngine:
    """A target and its draft.

    Attributes:
        draft: directory of the draft that is loaded, or None.
        draft_version: what it is called in outputs.
        speculating: whether steps are drafted.
        on_finish: called once for every request that ended, aborted ones too; must not block.
        on_step: called after every step with the seconds that drafting and the target's pass took; must not block.
    """

    def __init__(
        self, target: Decoder, target_dir: Path, draft: Draft | None, directory: Path | None, params: Params
    ) -> None:
        self._target, self._target_dir, self._draft, self._params = target, target_dir, draft, params
        self._rules: dict[bool, tuple[ModuleType, BaseParams]] = {
            True: _method("verify", params.verify_greedy),
            False: _method("verify", params.verify),
        }
        self._lengths = _method("lengths", params.lengths)
        self._trees = _method("trees", params.trees)
        if draft is not None and self._trees[0].BRANCHES and not draft.expands:
            raise ValueError(f"{type(draft).__name__} can't go on from any node of a tree; wanted trees = chain for it")
        self._cost = Cost()
        self._stops = _stop_ids(target_dir)
        self._running: set[_Sequence] = set()
        self.draft, self.draft_version = directory, ""
        self.speculating = draft is not None and params.num_draft_tokens > 0
        self.on_finish: OnFinish | None = None
        self.on_step: OnStep | None = None

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
        """Load both models.

        Args:
            target: a Hugging Face directory of a Llama-like model.
            draft: a draft's directory, or None for an engine without speculation.
            params: how it runs.
            served_name: not used; there is one model.
            draft_version: what the draft is called in outputs.
            costs: not used; it has one mode, and nothing is planned.

        Raises:
            ValueError: a directory can't be loaded.
        """
        dtype = fast_dtype(params.device) if params.dtype == "auto" else getattr(torch, params.dtype)
        decoder = Decoder.load(target, dtype, params.device)
        opened = None if draft is None else open_draft(draft, target).to(params.device)
        engine = cls(decoder, target, opened, draft, params)
        engine.draft_version = draft_version
        return engine

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        request_id: str,
        on_first_token: Callable[[], None] | None = None,
    ) -> Completion:
        """Answer one prompt; `on_first_token` is called when it has been read.

        Raises:
            ValueError: the prompt is empty or does not fit the context, or a setting is out of range.
        """
        limit = self._params.max_model_len
        if not 0 < len(prompt_ids) < limit:
            raise ValueError(f"the prompt has {len(prompt_ids)} tokens; wanted 1 to {limit - 1}")
        if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1 and sampling.max_tokens > 0):
            raise ValueError(f"wanted temperature from 0, top_p in (0, 1] and max_tokens from 1; got {sampling}")
        sequence = _Sequence(self, prompt_ids, sampling, request_id)
        self._running.add(sequence)
        try:
            while sequence.finish_reason is None:
                sequence.step()
                if on_first_token is not None:
                    on_first_token()
                    on_first_token = None
                await asyncio.sleep(0)  # the others' turn
        finally:
            self._running.discard(sequence)
            sequence.end()
            completion = sequence.completion()
            if self.on_finish is not None and sequence.token_ids:
                self.on_finish(completion, sampling)
        return completion

    async def swap_draft(self, directory: Path, version: str) -> float:
        """Replace the draft between two steps; return the milliseconds it took.

        Raises:
            ValueError: the file doesn't fit; nothing was changed.
        """
        if self._draft is None or self.draft is None:
            raise ValueError("this engine was started without a draft")
        started = time.monotonic()
        opened = self._open_like_served(directory)
        self._draft, self.draft, self.draft_version = opened, directory, version
        for sequence in self._running:
            sequence.use(opened, version)
        return 1000 * (time.monotonic() - started)

    async def check_draft(self, directory: Path) -> float:
        """Hold the loaded weights against those of `directory`; return the largest relative error.

        Raises:
            ValueError: a tensor is another than the file's.
        """
        if self._draft is None:
            raise ValueError("this engine was started without a draft")
        wanted = open_draft(directory, self._target_dir).state_dict()
        for name, got in self._draft.state_dict().items():
            if not torch.equal(got.cpu(), wanted[name]):
                raise ValueError(f"tensor {name} of the loaded draft differs from {directory.name}'s")
        return 0.0

    async def set_speculation(self, on: bool) -> None:
        """Switch drafting on or off.

        Raises:
            ValueError: the engine has no draft to switch on.
        """
        if on and self._draft is None:
            raise ValueError("speculation can't be switched on: the engine was started without a draft")
        self.speculating = on

    async def health(self) -> None:
        """Return; there is no process of its own that could be dead."""

    async def close(self) -> None:
        """Forget the models."""
        self._draft = None

    def took(self, proposal: Proposal, draft_s: float, verify_s: float) -> None:
        """Note what a step took; a chain's draft has made a pass for each token."""
        num_rows, num_passes = 1 + proposal.num_tokens, proposal.depth
        self._cost = self._cost.after(Time(1, num_rows, 0, 1000 * verify_s))
        if num_passes:
            self._cost = self._cost.after(Time(1, num_rows, num_passes, 1000 * (draft_s + verify_s)))
        if self.on_step is not None:
            self.on_step(draft_s, verify_s)

    def _open_like_served(self, directory: Path) -> Draft:
        assert self.draft is not None
        family_of(self.draft).check(directory, self.draft, describe(self._target_dir))
        return open_draft(directory, self._target_dir).to(self._params.device)


class _Sequence:
    """One request on its way."""

    def __init__(self, engine: TorchEngine, prompt_ids: list[int], sampling: Sampling, request_id: str) -> None:
        self._engine, self._sampling, self._request_id = engine, sampling, request_id
        self._target, self._params = engine._target, engine._params
        self._prompt_ids = list(prompt_ids)
        limit = min(self._params.max_model_len, len(prompt_ids) + sampling.max_tokens)
        self._max_new = limit - len(prompt_ids)
        # A step's last drafted tokens may reach past the end.
        self._cache = Cache(self._target, limit + self._params.num_draft_tokens + 1)
        self._draft, self.draft_version = engine._draft, engine.draft_version
        self._drafter: Drafter | None = None
        self._taps: tuple[int, ...] = ()
        if self._draft is not None and engine.speculating:
            self._drafter = self._draft.drafter(self._cache.max_len)
            if isinstance(self._drafter, SelfDrafter):
                self._drafter.share(self._target, self._cache)
            self.use(self._draft, engine.draft_version)
        self._rng = torch.Generator(self._target.device)
        if sampling.seed is not None:
            self._rng.manual_seed(sampling.seed)
        else:
            self._rng.seed()
        self._drafted_ids: list[tuple[int, ...]] = []
        self._counts: list[tuple[int, int]] = []  # drafted and accepted tokens of each step
        self._gaps: list[float] = []
        self._started, self._times = time.monotonic(), [0.0, 0.0]
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None

    def use(self, draft: Draft, version: str) -> None:
        """Draft with other weights of the same shape from now on."""
        self._draft, self.draft_version = draft, version
        if self._drafter is not None:
            self._drafter.draft = draft
            self._taps, self._vocabulary = draft.taps, draft.vocabulary

    @torch.inference_mode()
    def step(self) -> None:
        """Run the prompt the first time, then draft and verify once."""
        if not self.token_ids:
            states, tapped = self._target.forward(self._ids(self._prompt_ids), self._cache, self._taps)
            logits = self._target.logits(states[-1:])
            emitted = [_draw(logits[0], self._sampling, self._rng)]
            self._observe(self._prompt_ids[-1:], logits)
            self._extend(self._prompt_ids, emitted, tapped)
            self._emit(emitted, logits, [0])
            return
        started = time.perf_counter()
        proposal = self._propose()
        drafted = time.perf_counter()
        tokens, parents = proposal.token_ids[0].tolist(), proposal.row_parents
        last, before = self.token_ids[-1], self._cache.length
        begun = self._drafter.begun() if isinstance(self._drafter, SelfDrafter) else None
        states, tapped = self._target.forward(self._ids([last, *tokens]), self._cache, self._taps, parents, begun)
        logits = self._target.logits(states)
        verified = self._verify(proposal, logits)
        accepted = int(verified.num_accepted[0])
        emitted = verified.tokens[0, : accepted + 1].tolist()
        rows = [0, *(node + 1 for node in verified.path[0, :accepted].tolist())]
        self._cache.keep(before, rows)
        self._drafted_ids.append(tuple(tokens))
        self._counts.append((len(tokens), accepted))
        self._observe([last, *tokens], logits)
        self._extend([last], emitted, tapped[rows])
        self._emit(emitted, logits, rows)
        self._engine.took(proposal, drafted - started, time.perf_counter() - drafted)

    def end(self) -> None:
        """Let later requests draft from this one, if its draft does so."""
        if isinstance(self._drafter, Remembering):
            self._drafter.end()

    def _propose(self) -> Proposal:
        if self._drafter is None or not self._engine.speculating:
            return Proposal.chain([], device=self._target.device)
        policy, params = self._engine._lengths
        view = View(
            limit=self._params.num_draft_tokens,
            position=self._cache.length + 1,
            steps=tuple(self._counts),
            num_running=len(self._engine._running),
            cost=self._engine._cost,
        )
        num_tokens = policy.num_draft_tokens(view, params)
        if num_tokens == 0:
            return Proposal.chain([], device=self._target.device)
        tree, tree_params = self._engine._trees
        if tree.BRANCHES and isinstance(self._drafter, Expander):
            grown: Proposal = tree.grow(self._drafter.expand, num_tokens, tree_params)
            return grown
        go_on = _go_on(policy, view, params) if hasattr(policy, "go_on") else None
        return self._drafter.propose(num_tokens, self._draw_drafted, go_on)

    def _draw_drafted(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """See `models.drafts.Draw`."""
        if self._sampling.temperature == 0:
            return int(self._vocabulary[logits.argmax()]), None
        drawn_from = probabilities(logits[None].float(), self._sampling)[0]
        index = torch.multinomial(drawn_from, 1, generator=self._rng)
        return int(self._vocabulary[index]), self._spread(drawn_from)

    def _spread(self, drawn_from: Tensor) -> Tensor:
        """[D] probabilities of the draft's tokens → q [V], 0 outside its vocabulary."""
        if len(drawn_from) == self._target.vocab_size:
            return drawn_from
        return drawn_from.new_zeros(self._target.vocab_size).index_copy_(0, self._vocabulary, drawn_from)

    def _verify(self, proposal: Proposal, logits: Tensor) -> Verified:
        greedy = self._sampling.temperature == 0
        rule, params = self._engine._rules[greedy]
        p = logits if greedy else probabilities(logits, self._sampling)
        verified: Verified = rule.verify(proposal, p[None], self._rng, params)
        return verified

    def _observe(self, token_ids: list[int], logits: Tensor) -> None:
        """Show the drafter what the target said after each token of a pass."""
        if isinstance(self._drafter, Observer):
            self._drafter.observe(self._ids(token_ids), logits)

    def _extend(self, before: list[int], emitted: list[int], tapped: Tensor) -> None:
        """Show the drafter what is certain: `tapped` are the states of `before` and of all emitted but the last."""
        if self._drafter is not None:
            self._drafter.extend(self._ids([*before, *emitted]), tapped)

    def _emit(self, emitted: list[int], logits: Tensor, rows: list[int]) -> None:
        """Take over emitted tokens up to a stop or the limit; those after it were never accepted.

        Args:
            emitted: at least one.
            logits: [n, V] of the target's pass.
            rows: which of its rows said each token.
        """
        for number, (token, row) in enumerate(zip(emitted, rows, strict=True)):
            self.token_ids.append(token)
            if (self._sampling.num_logprobs or 0) >= 2:
                best, second = logits[row].log_softmax(-1).topk(2).values.tolist()
                self._gaps.append(best - second)
            stopped = token in self._engine._stops and not self._sampling.ignore_eos
            if stopped or len(self.token_ids) == self._max_new:
                self.finish_reason = "stop" if stopped else "length"
                if self._counts:
                    drafted, accepted = self._counts[-1]
                    self._counts[-1] = drafted, min(accepted, number + 1)
                break
        now = time.monotonic()
        self._times = [self._times[0] or now, now]

    def _ids(self, token_ids: list[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=self._target.device)

    def completion(self) -> Completion:
        """What came so far."""
        first, last = self._times
        return Completion(
            request_id=self._request_id,
            prompt_ids=tuple(self._prompt_ids),
            token_ids=tuple(self.token_ids),
            drafted=tuple(drafted for drafted, _ in self._counts),
            accepted=tuple(accepted for _, accepted in self._counts),
            drafted_ids=tuple(self._drafted_ids),
            finish_reason=self.finish_reason,
            first_token_ms=1000 * max(first - self._started, 0.0),
            per_token_ms=1000 * max(last - first, 0.0) / max(len(self.token_ids) - 1, 1),
            draft_version=self.draft_version,
            speculating=self._drafter is not None,
            gaps=tuple(self._gaps),
        )


start = TorchEngine.start


def child_environment(params: Params) -> dict[str, str]:
    """Return nothing; the engine takes its process as it is."""
    return {}


def require_draft(name: str) -> None:
    """Return: it drafts with every family."""


def require_tool_parser(name: str) -> None:
    """Raise ValueError: this engine is behind no endpoint."""
    raise ValueError(f'engine "torch" has no endpoint that could take tools, so no tool_parser; got "{name}"')


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """[n, V] logits → [n, V] what is sampled from: temperature, then the top_k best, then the smallest set of top_p.

    Raises:
        ValueError: the temperature is 0, which is no distribution but a choice.
    """
    if sampling.temperature <= 0:
        raise ValueError(f"temperature must be above 0 to sample; got {sampling.temperature}")
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(dropped, 0.0))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _draw(logits: Tensor, sampling: Sampling, rng: torch.Generator) -> int:
    """[V] logits → an index."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(probabilities(logits[None].float(), sampling)[0], 1, generator=rng))


def _go_on(policy: ModuleType, view: View, params: BaseParams) -> GoOn:
    """Return what a drafter asks after each of its passes in a step."""
    confidences: list[float] = []

    def ask(confidence: float) -> bool:
        confidences.append(confidence)
        return bool(policy.go_on(replace(view, confidences=tuple(confidences)), params))

    return ask


def _method(family: str, params: BaseParams) -> tuple[ModuleType, BaseParams]:
    return catalog.load(family, params.name), params


def _stop_ids(target: Path) -> frozenset[int]:
    """Token ids that end an answer, from the target's generation settings, else from its configuration."""
    has_settings = (target / "generation_config.json").is_file()
    settings = GenerationConfig if has_settings else AutoConfig
    ids = settings.from_pretrained(target).eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())
