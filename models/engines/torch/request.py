"""Requests of the reference engine, step by step: draft, let the target read, verify, keep."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from models.core.drafting.drafters import Expander, Nested, Observer, QueryingDrafter, Remembering, SelfDrafter
from models.core.drafting.lookup import NgramIndex
from models.core.drafting.proposal import Proposal
from models.core.drafting.sampling import draw, probabilities
from models.core.layers.decoder import Cache
from models.core.throughput.cost import Cost
from models.core.throughput.running import Acceptance
from models.drafts import Draft, Drafter, GoOn
from models.engines import Completion, LookUp, Sampling
from models.lengths import Plan, SequenceState, View
from models.params import BaseParams
from models.verify import Verified

if TYPE_CHECKING:
    from models.engines.torch import TorchEngine


# The reference engine knows neither domains nor keys.
DOMAIN, KEY = "", ""


class StepChoice(NamedTuple):
    """How a step drafts."""

    token_ids: list[int]  # that were looked up, in place of the draft's
    match: int  # tokens that had matched; 0 where the draft drafts
    num_tokens: int  # of the draft, at most; 0 for none


NO_TURN = StepChoice([], 0, 0)


class Joined:
    """Look-up joined to a draft, which the requests of an engine share: texts, and what was accepted of either source.

    A step is drafted by whichever of the two is expected to have more accepted for its time. The policy that plans the
    serving engine's steps plans these, by the same estimates, for one sequence at a time. What is looked up costs no
    pass of the draft, whose keys are whole all the same: it reads what is certain in any case.
    """

    def __init__(self, lookup: LookUp, lengths: tuple[ModuleType, BaseParams], limit: int) -> None:
        """Know nothing yet; the lengths are the policy and its keys, which can plan, and `limit` is K of the draft."""
        self._lookup, self._limit = lookup, limit
        self._policy, self._params = lengths
        self.library = NgramIndex(lookup.shortest, lookup.longest, lookup.remembered)
        self.acceptance = Acceptance()
        self._plan: Plan | None = None

    def turn(self, request_id: str, prompt_ids: list[int], token_ids: list[int], cost: Cost) -> StepChoice:
        """Choose how the next step of a request drafts, after so much of its answer."""
        sequence = self.library.sequence(request_id, KEY, len(prompt_ids))
        sequence.extend([*prompt_ids, *token_ids][len(sequence) :])
        running = SequenceState(DOMAIN, self.acceptance.lookups(DOMAIN))
        plan: Plan = self._policy.plan(cost, self.acceptance, [running], self._limit, self._plan, self._params)
        self._plan = plan
        if plan.look_up:
            match = sequence.look_up(self._lookup.num_tokens)
            self.acceptance.see_lookup(DOMAIN, match.length, len(match.token_ids))
            if match.length and (kept := plan.num_kept(DOMAIN, "lookup", match.length)):
                return StepChoice(match.token_ids[:kept], match.length, 0)
        return StepChoice([], 0, min(plan.num_kept(DOMAIN, "head"), plan.num_passes))

    def see(self, turn: StepChoice, num_drafted: int, num_accepted: int) -> None:
        """Take in what was accepted of a step."""
        self.acceptance.see(DOMAIN, "lookup" if turn.match else "head", num_drafted, num_accepted, turn.match)


class Took(NamedTuple):
    """What one step took."""

    num_rows: int  # of the target's pass
    num_passes: int  # of the draft; a chain's is one for each token
    draft_s: float  # until the proposal was there; where the target ran meanwhile, what it had to be waited for
    target_s: float  # the rest: the target's pass, verification, and what the drafter is shown


class Request:
    """One request on its way: its caches, its drafter, and what came so far; `finish_reason` is None until it ends."""

    CHUNKS = 1  # of K tokens, that are drafted beyond what is certain

    def __init__(self, engine: "TorchEngine", prompt_ids: list[int], sampling: Sampling, request_id: str) -> None:
        self._engine, self._sampling, self.request_id = engine, sampling, request_id
        self._target, self._params = engine.target, engine.params
        self._prompt_ids = list(prompt_ids)
        limit = min(self._params.max_model_len, len(prompt_ids) + sampling.max_tokens)
        self._max_new = limit - len(prompt_ids)
        self._draft, self.draft_version = engine.loaded, engine.draft_version
        # A step's last drafted tokens may reach past the end, and stand there with what is read beside them.
        drafted = max(self._params.num_draft_tokens, self._params.lookup.num_tokens)
        beside = 0 if self._draft is None else self._draft.num_vectors(drafted)
        self._cache = Cache(self._target, limit + self.CHUNKS * drafted + 1 + beside)
        self._drafter: Drafter | None = None
        self._taps: tuple[int, ...] = ()
        self._vectors: tuple[int, ...] = ()
        if self._draft is not None and engine.speculating:
            self._drafter = self._draft.drafter(self._cache.max_len)
            if isinstance(self._drafter, SelfDrafter):
                self._drafter.share(self._target, self._cache)
            if self._params.nested_confidence is not None and isinstance(self._drafter, Nested):
                self._drafter.take_from(self._params.nested_confidence)
            self.use(self._draft, engine.draft_version)
        self._rng = torch.Generator(self._target.device)
        if sampling.seed is not None:
            self._rng.manual_seed(sampling.seed)
        else:
            self._rng.seed()
        self._drafted_ids: list[tuple[int, ...]] = []
        self._counts: list[tuple[int, int]] = []  # drafted and accepted tokens of each step
        self._joined = engine.joined if sampling.drafting == "auto" else None
        self._turn = NO_TURN
        self._matches: list[int] = []
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
            numbers = [draft.num_vectors(number) for number in range(self._params.num_draft_tokens + 1)]
            self._vectors = tuple(numbers) if any(numbers) else ()

    @torch.inference_mode()
    def step(self) -> None:
        """Run the prompt the first time, then draft and verify once."""
        if not self.token_ids:
            states, tapped = self._target.forward(self._ids(self._prompt_ids), self._cache, self._taps)
            logits = self._target.logits(states[-1:])
            emitted = [self._first(logits, states[-1:])]
            self._observe(self._prompt_ids[-1:], logits)
            self._extend(self._prompt_ids, emitted, tapped)
            self._emit(emitted, logits, [0])
            return
        started = time.perf_counter()
        proposal, num_passes = self._propose()
        drafted = time.perf_counter()
        tokens, parents = proposal.token_ids[0].tolist(), proposal.row_parents
        last, before = self.token_ids[-1], self._cache.length
        begun = self._drafter.begun() if isinstance(self._drafter, SelfDrafter) and not self._turn.match else None
        asker = self._drafter if tokens and isinstance(self._drafter, QueryingDrafter) else None
        vectors, beside = (None, ()) if asker is None else asker.ask(proposal)
        states, tapped = self._target.forward(
            self._ids([last, *tokens]), self._cache, self._taps, (*parents, *beside), begun, vectors
        )
        states, heard = states.tensor_split([len(parents)])
        logits = self._target.logits(states)
        verified = self._verify(proposal, logits, states)
        accepted = int(verified.num_accepted[0])
        emitted = verified.tokens[0, : accepted + 1].tolist()
        rows = [0, *(node + 1 for node in verified.path[0, :accepted].tolist())]
        self._cache.keep(before, rows)
        self._drafted_ids.append(tuple(tokens))
        self._counts.append((len(tokens), accepted))
        if self._joined is not None:
            self._joined.see(self._turn, len(tokens), accepted)
            self._matches.append(self._turn.match)
        self._observe([last, *tokens], logits)
        self._extend([last], emitted, tapped[rows])
        if asker is not None:
            asker.hear(heard, rows[-1])
        self._emit(emitted, logits, rows)
        done = time.perf_counter()
        self._engine.took(Took(len(parents) + len(beside), num_passes, drafted - started, done - drafted))

    def end(self) -> None:
        """Let later requests draft from this one, if its draft does so."""
        if isinstance(self._drafter, Remembering):
            self._drafter.end()

    def _propose(self) -> tuple[Proposal, int]:
        """Return what is drafted, and in how many passes."""
        self._turn = NO_TURN
        if self._drafter is None or not self._engine.speculating:
            return Proposal.chain([], device=self._target.device), 0
        policy, params = self._engine.lengths
        view = self._view()
        if self._joined is None:
            num_tokens = policy.num_draft_tokens(view, params)
        else:
            self._turn = self._joined.turn(self.request_id, self._prompt_ids, self.token_ids, view.cost)
            num_tokens = self._turn.num_tokens
        if num_tokens == 0:  # as where it was looked up
            return Proposal.chain(self._turn.token_ids, device=self._target.device), 0
        tree, tree_params = self._engine.trees
        if tree.BRANCHES and isinstance(self._drafter, Expander):
            expand, passes = self._drafter.expand, []

            def counted(token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
                passes.append(len(nodes))
                return expand(token_ids, parents, nodes)

            return tree.grow(counted, num_tokens, tree_params), len(passes)
        go_on = self._go_on(view) if hasattr(policy, "go_on") else None
        proposal = self._drafter.propose(num_tokens, self._draw_drafted, go_on)
        return proposal, proposal.depth

    def _view(self) -> View:
        return View(
            limit=self._params.num_draft_tokens,
            steps=tuple(self._counts),
            num_running=len(self._engine.running),
            cost=self._engine.cost,
            vectors=self._vectors,
        )

    def _draw_drafted(self, logits: Tensor) -> tuple[int, Tensor | None]:
        """See `models.drafts.Draw`."""
        if self._sampling.temperature == 0:
            index, q = int(logits.argmax()), None
        else:
            drawn_from = probabilities(logits[None].float(), self._sampling)[0]
            index, q = int(torch.multinomial(drawn_from, 1, generator=self._rng)), self._spread(drawn_from)
        self._said = logits, index
        return int(self._vocabulary[index]), q

    def _go_on(self, view: View) -> GoOn:
        policy, params = self._engine.lengths
        confidences: list[float] = []

        def ask(confidence: float) -> bool:
            if hasattr(policy, "estimate"):
                confidence = policy.estimate(*self._said, len(confidences), params)
            confidences.append(confidence)
            return bool(policy.go_on(replace(view, confidences=tuple(confidences)), params))

        return ask

    def _spread(self, drawn_from: Tensor) -> Tensor:
        """[D] probabilities of the draft's tokens → q [V], 0 outside its vocabulary."""
        if len(drawn_from) == self._target.vocab_size:
            return drawn_from
        return drawn_from.new_zeros(self._target.vocab_size).index_copy_(0, self._vocabulary, drawn_from)

    def _first(self, logits: Tensor, states: Tensor) -> int:
        """Return the token after the prompt: by the rule where it decodes greedily, as all that follow are."""
        if self._sampling.temperature > 0:
            return draw(logits[0], self._sampling, self._rng)
        return int(self._verify(Proposal.chain([], device=self._target.device), logits, states).tokens[0, 0])

    def _verify(self, proposal: Proposal, logits: Tensor, states: Tensor) -> Verified:
        greedy = self._sampling.temperature == 0
        rule, params = self._engine.rules[greedy]
        p = logits if greedy else probabilities(logits, self._sampling)
        more: dict[str, object] = {"states": states[None]} if hasattr(rule, "READS_STATES") else {}
        if hasattr(rule, "READS_TEXT"):
            more["text"] = [[*self._prompt_ids, *self.token_ids]]
        return cast("Verified", rule.verify(proposal, p[None], self._rng, params, **more))

    def _observe(self, token_ids: list[int], logits: Tensor) -> None:
        """Show the drafter what the target said after each token of a pass."""
        if isinstance(self._drafter, Observer):
            self._drafter.observe(self._ids(token_ids), logits)

    def _extend(self, before: list[int], emitted: list[int], tapped: Tensor) -> None:
        """Show the drafter what is certain: `tapped` are the states of `before` and of all emitted but the last."""
        if self._drafter is not None:
            self._drafter.extend(self._ids([*before, *emitted]), tapped)

    def _emit(self, emitted: list[int], logits: Tensor, rows: list[int]) -> None:
        """Take over emitted tokens up to a stop or the limit; `rows` of the pass's logits [n, V] said them."""
        for number, (token, row) in enumerate(zip(emitted, rows, strict=True)):
            self.token_ids.append(token)
            if (self._sampling.num_logprobs or 0) >= 2:
                best, second = logits[row].log_softmax(-1).topk(2).values.tolist()
                self._gaps.append(best - second)
            stopped = token in self._engine.stops and not self._sampling.ignore_eos
            stopped = stopped or token in self._sampling.stop_ids
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
            request_id=self.request_id,
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
            matches=tuple(self._matches),
            drafting=self._sampling.drafting,
        )


class Overlapped(Request):
    """A request whose draft runs while its target does, in a thread of its own; see `models.lengths.pearl`.

    torch holds no lock while it multiplies, so that the two share a machine of two cores or more. Both draw from one
    generator, in turn: the draft's thread has ended when the rule draws.
    """

    CHUNKS = 2  # one waits while the other is drafted

    def __init__(self, engine: "TorchEngine", prompt_ids: list[int], sampling: Sampling, request_id: str) -> None:
        super().__init__(engine, prompt_ids, sampling, request_id)
        self._waiting: list[tuple[int, Tensor | None]] = []  # drafted tokens that were not verified, and their q
        self._thread = ThreadPoolExecutor(max_workers=1)

    @torch.inference_mode()
    def step(self) -> None:
        if not self.token_ids or self._drafter is None or not self._engine.speculating:
            self._waiting = []
            super().step()
            return
        policy, params = self._engine.lengths
        number = policy.num_draft_tokens(self._view(), params)
        last, before = self.token_ids[-1], self._cache.length
        read = [last, *(token for token, _ in self._waiting)]
        started = time.perf_counter()
        drafting = self._thread.submit(self._draft_on, number)
        states, tapped = self._target.forward(self._ids(read), self._cache, self._taps)
        logits = self._target.logits(states)
        done = time.perf_counter()
        drafted = drafting.result()
        waited_s = time.perf_counter() - done
        tried = [*self._waiting, *drafted[:1]]
        tokens = [token for token, _ in tried]
        # What follows a new token is not known yet, and is not asked: a stand-in, of which nothing is emitted.
        rows = [*range(len(read)), *[-1] * bool(drafted)]
        proposal = Proposal.chain(tokens, [q for _, q in tried], self._target.device)
        verified = self._verify(proposal, logits[rows], states[rows])
        accepted = int(verified.num_accepted[0])
        emitted = verified.tokens[0, : accepted + 1].tolist()
        if whole := accepted == len(tokens) and bool(drafted):
            emitted = tokens
        self._waiting = drafted[1:] if whole else []
        kept = list(range(len(emitted)))
        self._cache.keep(before, kept)
        self._drafted_ids.append(tuple(tokens))
        self._counts.append((len(tokens), len(emitted) - 1))
        self._observe(read, logits)
        self._extend([last], emitted, tapped[kept])
        self._emit(emitted, logits, kept)
        whole_s = time.perf_counter() - started
        self._engine.took(Took(len(read), len(drafted), waited_s, whole_s - waited_s))

    def end(self) -> None:
        self._thread.shutdown()
        super().end()

    @torch.inference_mode()
    def _draft_on(self, number: int) -> list[tuple[int, Tensor | None]]:
        """Draft at most so many tokens after those that wait; fewer where the draft can say no more."""
        assert isinstance(self._drafter, Expander)
        chain, drafted = [token for token, _ in self._waiting], []
        for _ in range(number):
            said = self._drafter.expand(chain, range(-1, len(chain) - 1), [len(chain) - 1])[0, self._vocabulary]
            if said.max() == float("-inf"):
                break
            drafted.append(self._draw_drafted(said))
            chain.append(drafted[-1][0])
        return drafted
