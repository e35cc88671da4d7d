"""From a finished request to a row of the query log, in a thread of its own: scrubbing takes milliseconds.

The engine reports a finished generation by its own id, in which the id of the HTTP request is found again. One HTTP
request may be several generations (a list of prompts); each is a row. Probes carry no such id and leave no row, and
requests for several choices (`n`) neither: the engine's tap follows one sequence.

Acceptance is that of requests which the acceptance sampler drew, head-only (services/drift.py), kept by the draft
that a request began with. A request that asks to be drafted so does not count, or a client could choose what
a draft is measured by, nor does one whose answer a grammar constrained.

Where scrubbing changed something, the drafted ids and the counts per step no longer belong to the tokens and are
dropped. A server elsewhere (services/record.py) counts its steps, but does not tell what it drafted.
"""

import itertools
import logging
import queue
import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from infra import scrub
from infra.consent import CONSENT_LEVELS, OTHER_DOMAINS, QueryRow, redact
from infra.querylog import BackgroundWriter
from infra.status import LogCounts, RecentAcceptance
from models.core.evaluation.acceptance import AcceptanceCount, counted
from models.types import MIN_COMPLETION, Frozen
from services.questions import Origin

if TYPE_CHECKING:
    from models.engines import Completion

REQUEST_ID = re.compile(r"[0-9a-f]{32}")
SAMPLING = (
    "temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
ROLLING = 64  # requests of a draft and a domain or a context length, or answers of a domain, that a figure is over
# Context lengths, in tokens of prompt and answer: a request counts for the least that it fits in.
CONTEXTS, LONGER = (512, 2048, 8192, 32768), "longer"
MAX_DOMAINS = 128  # names come from clients; each is a series of the metrics
LATELY = 256
MAX_DRAFTS = 4
MAX_LEFT = 256

Settle = Callable[["Completion", str | None], None]
# Changes the text of token ids, see `models.markers.Markers.rewrite`.
Rewrite = Callable[[Sequence[int], Callable[[str], str]], tuple[list[int], str]]

log = logging.getLogger(__name__)


class RequestedSampling(Protocol):
    """vLLM's SamplingParams. Those of SAMPLING that it has are kept."""

    n: int


class Speculated(Frozen):
    """What speculation did for a request: `usage.redraft` of an answer.

    Attributes:
        draft_version: number of the draft in the registry, "" without one.
        drafted: tokens drafted.
        accepted: drafted tokens that the target kept.
        looked_up: those of them that were not drafted by the draft model, but stood in the request or in an earlier
            answer to its key.
        steps: verification steps.
        mean_accepted_length: τ, 1 + accepted / steps, of steps for which draft or look-up was run; null without one.
        drafted_per_step: tokens drafted in each step; left out unless an operator asks with `X-Redraft-Detail: steps`.
        accepted_per_step: tokens accepted in each step; likewise.
    """

    draft_version: str
    drafted: int
    accepted: int
    looked_up: int
    steps: int
    mean_accepted_length: float | None
    drafted_per_step: list[int] | None = None
    accepted_per_step: list[int] | None = None


class Tallies(NamedTuple):
    """What the last requests that began with a draft got, by domain and by context length."""

    by_domain: dict[str, deque[AcceptanceCount]]
    by_context: dict[str, deque[AcceptanceCount]]


class VocabularyCoverage:
    """How much of what is served a draft's vocabulary can say, by domain; a token that it lacks is always rejected."""

    def __init__(self) -> None:
        self._draft, self._vocabulary = "", frozenset[int]()
        self._answers: dict[str, deque[tuple[int, int]]] = {}  # tokens of an answer, and how many of them are covered

    def follow(self, draft: str, vocabulary: frozenset[int] | None) -> None:
        """Count for another draft from now on, by its version; None if its vocabulary is the target's: for none."""
        self._draft, self._vocabulary = ("", frozenset()) if vocabulary is None else (draft, vocabulary)
        self._answers = {}

    def add(self, draft: str, domain: str, token_ids: Sequence[int]) -> None:
        """Count an answer that began with a draft, which may be another one; the first token is never drafted."""
        if draft == self._draft and self._draft and len(token_ids) > 1:
            covered = sum(token in self._vocabulary for token in token_ids[1:])
            answers = self._answers.setdefault(_bounded(domain, self._answers), deque(maxlen=ROLLING))
            answers.append((len(token_ids) - 1, covered))

    def shares(self) -> dict[str, float]:
        """Return domain to the share of the last answers' tokens; empty for a draft that can say every token."""
        return {
            domain: sum(covered for _, covered in answers) / sum(tokens for tokens, _ in answers)
            for domain, answers in sorted(self._answers.items())
        }


class Recorder:
    """Holds what is known of running requests and hands finished ones to the log; never makes a request wait.

    `settle`, where hidden states are captured, is told of each generation that ended, with the row that holds it as it
    was served, None if there is none.

    Of the completion tokens served, `tokens`, those that were drafted are `accepted`: by the draft, `head`, looked up
    in earlier text, `lookup`, and of answers that a grammar constrained, `structured`.

    A row names the server that an answer names, otherwise `server`.
    """

    def __init__(
        self,
        writer: BackgroundWriter,
        rewrite: Rewrite,
        target_version: int,
        capacity: int = 1024,
        settle: Settle | None = None,
        server: str = "",
    ) -> None:
        self.dropped = self.tokens = 0
        self.accepted = Counter(head=0, lookup=0, structured=0)
        self.coverage = VocabularyCoverage()
        self._writer, self._rewrite, self._target_version, self._settle = writer, rewrite, target_version, settle
        self._server = server
        self._running, self._left = dict[str, Origin](), OrderedDict[str, Origin]()
        self._finished: dict[str, list[Completion]] = {}
        self._rolling = OrderedDict[str, Tallies]()  # by draft
        self._unlogged, self._serial = deque[bool](maxlen=LATELY), itertools.count()
        self._contexts = deque[int](maxlen=LATELY)
        self._queue: queue.Queue[tuple[Completion, dict[str, Any], Origin, str] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._drain, name="recorder", daemon=True)
        self._thread.start()

    def expect(self, origin: Origin) -> None:
        """Remember a request before it goes to the engine."""
        self._running[origin.request_id] = origin

    def forget(self, request_id: str) -> None:
        """Drop a request that was answered, refused or left; a left one may still report what it got."""
        origin = self._running.pop(request_id, None)
        if origin is not None and self._finished.pop(request_id, None) is None:
            self._left[request_id] = origin
            if len(self._left) > MAX_LEFT:
                self._left.popitem(last=False)

    def origin_of(self, generation_id: str) -> Origin | None:
        """Return the request that a generation belongs to, by the engine's id of it; None if it is nobody's."""
        found = REQUEST_ID.search(generation_id)
        return (self._running.get(found[0]) or self._left.get(found[0])) if found else None

    def finished(self, completion: "Completion", params: RequestedSampling) -> None:
        """Take a finished generation; the engine calls it in the event loop."""
        origin = self.origin_of(completion.request_id)
        if origin is None or params.n > 1:
            return
        self._left.pop(origin.request_id, None)
        siblings = self._finished.setdefault(origin.request_id, []) if origin.request_id in self._running else []
        siblings.append(completion)
        self.tokens += len(completion.token_ids)
        looked_up, accepted = _looked_up(completion), sum(completion.accepted)
        if completion.structured:
            self.accepted["structured"] += accepted
        else:
            self.accepted.update(lookup=looked_up, head=accepted - looked_up)
        self.coverage.add(completion.draft_version, origin.domain, completion.token_ids)
        if origin.speculation != "head":
            self._count(completion, origin.domain)
        self._contexts.append(_num_tokens(completion))
        self._unlogged.append(origin.consent == "none")
        if origin.consent == "none":
            return
        row_id = f"{completion.request_id[:96]}.{len(siblings)}"
        sampling = {name: value for name in SAMPLING if (value := getattr(params, name, None)) is not None}
        try:
            self._queue.put_nowait((completion, sampling, origin, row_id))
        except queue.Full:
            self.dropped += 1
            self._settled(completion, None)

    def usage(self, request_id: str, by_step: bool = False) -> dict[str, Any] | None:
        """Return what speculation did for a request so far, as the response reports it; None if nothing finished."""
        completions = self._finished.get(request_id)
        if not completions:
            return None
        drafted = [count for completion in completions for count in completion.drafted]
        accepted = [count for completion in completions for count in completion.accepted]
        num_counted = sum(len(completion.trace("").drafted) for completion in completions)
        speculated = Speculated(
            draft_version=completions[-1].draft_version,
            drafted=sum(drafted),
            accepted=sum(accepted),
            looked_up=sum(map(_looked_up, completions)),
            steps=len(drafted),
            mean_accepted_length=round(1 + sum(accepted) / num_counted, 4) if num_counted else None,
            drafted_per_step=drafted,
            accepted_per_step=accepted,
        )
        return speculated.model_dump(exclude=None if by_step else {"drafted_per_step", "accepted_per_step"})

    def acceptance(self, draft_version: str) -> dict[str, RecentAcceptance]:
        """Return the acceptance of each domain's last requests that began with a draft."""
        tallies = self._of(draft_version).by_domain
        return {domain: _recent(tallies[domain]) for domain in sorted(tallies)}

    def acceptance_by_context(self, draft_version: str) -> dict[str, RecentAcceptance]:
        """Return that of the last requests of each context length."""
        tallies = self._of(draft_version).by_context
        return {length: _recent(tallies[length]) for length in (*map(str, CONTEXTS), LONGER) if length in tallies}

    def longest_context(self) -> int:
        """Return the tokens of the longest of the last requests; 0 if there was none."""
        return max(self._contexts, default=0)

    def recent(self, draft_version: str, after: int = -1) -> list[AcceptanceCount]:
        """Return the last requests that began with a draft, oldest first: of a domain so many, and after a number."""
        domains = self._of(draft_version).by_domain.values()
        return sorted(one for tallies in domains for one in tallies if one.number > after)

    def counts(self) -> LogCounts:
        """Return rows written and dropped, and the last error."""
        return LogCounts(
            written=self._writer.written,
            dropped=self._writer.dropped + self.dropped,
            unlogged=sum(self._unlogged),
            last_error=self._writer.last_error,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, then end the threads."""
        deadline_s = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            log.warning("the recorder did not end in %g s", timeout_s)
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        self._writer.close(max(0.1, deadline_s - time.monotonic()))

    def _count(self, completion: "Completion", domain: str) -> None:
        drafted, accepted = counted(completion.drafted, completion.accepted, completion.matches)
        if not completion.speculating or not drafted or completion.drafting != "head" or completion.structured:
            return
        if completion.draft_version not in self._rolling and len(self._rolling) >= MAX_DRAFTS:
            self._rolling.popitem(last=False)
        of_draft = self._rolling.setdefault(completion.draft_version, Tallies({}, {}))
        self._rolling.move_to_end(completion.draft_version)
        domain = _bounded(domain, of_draft.by_domain)
        tally = AcceptanceCount(next(self._serial), domain, len(drafted), sum(drafted), sum(accepted))
        length = next((str(most) for most in CONTEXTS if _num_tokens(completion) <= most), LONGER)
        for tallies, name in ((of_draft.by_domain, domain), (of_draft.by_context, length)):
            tallies.setdefault(name, deque(maxlen=ROLLING)).append(tally)

    def _of(self, draft_version: str) -> Tallies:
        return self._rolling.get(draft_version, Tallies({}, {}))

    def _drain(self) -> None:
        while (job := self._queue.get()) is not None:
            row_id = None
            try:
                row = self._row(*job)
                if row is not None and self._writer.offer(row) and row.drafted_ids is not None:
                    row_id = row.id
            except Exception as error:  # noqa: BLE001 - the edge: a row that can't be made must not end the thread
                self.dropped += 1
                log.warning("a row was dropped: %s", type(error).__name__)  # its text may quote the request
            self._settled(job[0], row_id)

    def _settled(self, completion: "Completion", row_id: str | None) -> None:
        try:
            if self._settle is not None:
                self._settle(completion, row_id)
        except Exception as error:  # noqa: BLE001 - the edge: states that are lost must not end the thread
            log.warning("hidden states could not be settled: %s", type(error).__name__)

    def _row(self, completion: "Completion", sampling: dict[str, Any], origin: Origin, row_id: str) -> QueryRow | None:
        row = QueryRow(
            id=row_id,
            time_ms=int(time.time() * 1000),
            subject=origin.subject,
            aliases=list(origin.aliases) or None,
            key=origin.key,
            group=origin.group,
            domain=origin.domain,
            consent=origin.consent,
            scrubber_revision=scrub.REVISION,
            target_version=self._target_version,
            server=completion.server or self._server or None,
            draft_version=int(completion.draft_version) if completion.draft_version else None,
            drafted=list(completion.drafted),
            accepted=list(completion.accepted),
            sampling=sampling,
            finish_reason=completion.finish_reason or "abort",
            first_token_ms=completion.first_token_ms,
            per_token_ms=completion.per_token_ms,
            speculating=completion.speculating,
            drafting=completion.drafting,
            matches=list(completion.matches) or None,
            structured=completion.structured,
        )
        # Text that teaches nothing, as of a gateway's health probes, isn't kept and makes no refresh due.
        if origin.consent != "full" or len(completion.token_ids) < MIN_COMPLETION:
            return redact(row, min(origin.consent, "metadata", key=CONSENT_LEVELS.index))
        prompt_ids, prompt = self._rewrite(completion.prompt_ids, scrub.scrub)
        ids, text = self._rewrite(completion.token_ids, scrub.scrub)
        content: dict[str, Any] = {
            "prompt": prompt,
            "completion": text,
            "prompt_ids": prompt_ids,
            "completion_ids": ids,
        }
        if prompt_ids != list(completion.prompt_ids) or ids != list(completion.token_ids):
            content |= {"drafted": None, "accepted": None, "matches": None}
        elif completion.drafted_ids:
            content["drafted_ids"] = [list(step) for step in completion.drafted_ids]
        return QueryRow(**row.model_dump() | content)


def _recent(tallies: Collection[AcceptanceCount]) -> RecentAcceptance:
    return RecentAcceptance.of([one[2:] for one in tallies])


def _bounded(domain: str, known: Collection[str]) -> str:
    return domain if domain in known or len(known) < MAX_DOMAINS else OTHER_DOMAINS


def _num_tokens(completion: "Completion") -> int:
    return len(completion.prompt_ids) + len(completion.token_ids)


def _looked_up(completion: "Completion") -> int:
    """Return how many accepted tokens the draft did not draft itself."""
    return sum(kept for match, kept in zip(completion.matches, completion.accepted, strict=False) if match > 0)
