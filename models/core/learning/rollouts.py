"""Answers that a draft writes, alone or with its target, while it learns.

It drafts up to K tokens at a time, as in serving, and nothing verifies them. The target reads them, so that the draft
goes on from the target's states, and writes the tokens that are its own to write. An answer becomes as long as the one
that it stands for, or ends where a token ends it.

A run writes in rounds, evenly over its steps. What was written is kept until the next round, so that a killed run goes
on with the same text. One sequence is written at a time, since a drafter is one sequence's.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from models import catalog
from models.answers import OnProgress, RolloutParams
from models.core.drafting.drafters import SelfDrafter
from models.core.drafting.sampling import draw
from models.core.layers.decoder import Cache, Decoder
from models.core.layers.kernels import fast_dtype
from models.core.learning.hidden import HiddenStates, Sample, hidden_states
from models.drafts import Draft
from models.engines import Sampling
from models.targets import stop_ids
from models.types import MIN_COMPLETION


def write(
    draft: Draft,
    target: Decoder,
    sample: Sample,
    by_draft: Sequence[bool],
    temperature: float,
    num_draft_tokens: int,
    stops: frozenset[int],
    rng: torch.Generator,
) -> list[int]:
    """Write another answer to a sample's prompt; return its token ids. The first token is the sample's.

    `by_draft` says of each token whether the draft writes it; temperature 0 takes the likeliest tokens; draft, target
    and `rng` are on one device.
    """
    sampling = Sampling(temperature=temperature)

    def drafted(logits: Tensor) -> tuple[int, None]:
        return int(draft.vocabulary[draw(logits, sampling, rng)]), None

    def tensor(token_ids: Sequence[int]) -> Tensor:
        return torch.tensor(token_ids, dtype=torch.int64, device=target.device)

    answer = [sample.completion_ids[0]]
    room = num_draft_tokens + 1 + draft.num_vectors(num_draft_tokens)
    cache = Cache(target, len(sample.prompt_ids) + len(by_draft) + room)
    drafter = draft.drafter(cache.max_len)
    if isinstance(drafter, SelfDrafter):
        drafter.share(target, cache)
    _, tapped = target.forward(tensor(sample.prompt_ids), cache, draft.taps)
    drafter.extend(tensor([*sample.prompt_ids, *answer]), tapped)
    while len(answer) < len(by_draft) and answer[-1] not in stops:
        last, turns = answer[-1], by_draft[len(answer) : len(answer) + num_draft_tokens]
        asked = turns.index(False) if False in turns else len(turns)
        tokens = drafter.propose(asked, drafted).token_ids[0].tolist() if asked else []
        tokens = next((tokens[:end] for end, token in enumerate(tokens, 1) if token in stops), tokens)
        # A draft that has no more to say hands over too.
        hands_over = not tokens or (len(tokens) == asked < len(turns) and tokens[-1] not in stops)
        read = tensor([last, *tokens] if hands_over else [last, *tokens[:-1]])
        states, tapped = target.forward(read, cache, draft.taps)
        if hands_over:
            tokens.append(draw(target.logits(states[-1:])[0], sampling, rng))
        drafter.extend(tensor([last, *tokens]), tapped)
        answer += tokens
    return answer


class Rollouts:
    """The rounds of one run.

    Attributes:
        samples: the target's answers, in whose place others are written.
        tokens_per_s: at which the target read the last ones.
    """

    def __init__(
        self,
        draft: Draft,
        target_dir: Path,
        samples: Sequence[Sample],
        params: RolloutParams,
        num_draft_tokens: int,
        work_dir: Path,
        seed: int,
    ) -> None:
        self.samples, self.tokens_per_s, self.number = list(samples), 0.0, params.rounds
        self._draft, self._target_dir, self._params, self._seed = draft, target_dir, params, seed
        self._num_draft_tokens, self._folder = num_draft_tokens, work_dir / "written"

    def at(self, step: int, total: int) -> int:
        """Return which round a step is of."""
        return min(step * self.number // total, self.number - 1)

    def begin(self, number: int, key: str, report: OnProgress) -> HiddenStates:
        """Return what is learnt in a round, counted from 0; `key` is what must be equal for files to be this run's.

        It is written now, by the draft as it is, unless it was already. Other rounds' files are removed.

        Raises:
            ValueError: the draft ended every answer at once.
        """
        folder = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}-{number}"
        for other in self._folder.glob("*"):
            if other != folder:
                shutil.rmtree(other)
        folder.mkdir(parents=True, exist_ok=True)
        written = [one for one in self._written(folder, number, report) if len(one.completion_ids) >= MIN_COMPLETION]
        if not written:
            raise ValueError(
                f"the draft ended all of {len(self.samples)} answers at once, so nothing was written to learn from; "
                "let it learn the target's answers first"
            )
        shown, device = partial(report, "hidden states"), str(self._draft.vocabulary.device)
        states = hidden_states(self._draft, self._target_dir, written, folder, shown, device)
        self.tokens_per_s = states.tokens_per_s
        return states

    def end(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @torch.inference_mode()
    def _written(self, folder: Path, number: int, report: OnProgress) -> list[Sample]:
        file, seed = folder / "answers.jsonl", self._seed * 1009 + number
        if file.is_file():
            return [Sample(**json.loads(line)) for line in file.read_text().splitlines()]
        lengths, source = [len(one.completion_ids) for one in self.samples], catalog.load("answers", self._params.name)
        writers = source.by_draft(lengths, self._params, torch.Generator().manual_seed(seed))
        device = str(self._draft.vocabulary.device)
        target = Decoder.load(self._target_dir, fast_dtype(device), device)
        stops, written, started, num_tokens = stop_ids(self._target_dir), [], perf_counter(), 0
        for place, (sample, by_draft) in enumerate(zip(self.samples, writers, strict=True)):
            if by_draft is not None:
                rng = torch.Generator(device).manual_seed(seed * 1_000_003 + place)
                more = self._params.temperature, self._num_draft_tokens, stops, rng
                sample = sample._replace(completion_ids=write(self._draft, target, sample, by_draft, *more))
                num_tokens += len(sample.completion_ids)
            written.append(sample)
            report("answers", place + 1, len(self.samples), num_tokens / (perf_counter() - started))
        partial = file.with_name("new.jsonl")  # an erasure reads .jsonl, also what a killed run left
        partial.write_text("".join(json.dumps(sample._asdict()) + "\n" for sample in written))
        partial.replace(file)
        return written
