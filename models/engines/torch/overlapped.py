"""A request whose draft runs while its target does, in a thread of its own; see `models.lengths.pearl`.

torch holds no lock while it multiplies, so that the two share a machine of two cores or more. Both draw from one
generator, in turn: the draft's thread has ended when the rule draws.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.core.drafting.drafters import Expander
from models.core.drafting.proposal import Proposal
from models.engines import Sampling
from models.engines.torch.request import Request, Took

if TYPE_CHECKING:
    from models.engines.torch import TorchEngine


class Overlapped(Request):
    """See `models.engines.torch.request.Request`."""

    CHUNKS = 2  # one waits while the other is drafted

    def __init__(self, engine: "TorchEngine", prompt_ids: list[int], sampling: Sampling, request_id: str) -> None:
        super().__init__(engine, prompt_ids, sampling, request_id)
        self._waiting: list[tuple[int, Tensor | None]] = []  # drafted tokens that were not verified, and their q
        self._thread = ThreadPoolExecutor(max_workers=1)

    @torch.inference_mode()
    def step(self) -> None:
        """Run the prompt the first time, then read and draft at once."""
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
        """See the base."""
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
