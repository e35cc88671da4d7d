"""The one distillation loop: a draft learns to say what the target would say next.

Two things make it cheap. The target runs once per sequence (`models.hidden`). And of the unrolled steps only those rows
run whose earlier drafted tokens were right. When one is wrong, serving throws the rest of the block away, so what the
draft would have said next is never read. The work per token follows the acceptance rate instead of K.
"""

import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from models import catalog
from models.answers import Written, require_labels, target, token_counts
from models.batches import hidden_states, pack
from models.captured import Captures
from models.drafts import Draft, Procedure, Unrolled
from models.fitted import WithHeads
from models.hidden import HiddenStates, Sample, length_buckets
from models.params import BaseParams
from models.resume import load_progress, load_state, save_progress, save_state
from models.teacher import TeacherParams, Teachers, require_reader, require_teachers
from models.written import Rounds


class Params(WithHeads):
    """Settings of the loop.

    Attributes:
        learning_rate: of AdamW, at its highest.
        warmup: share of the steps in which the learning rate rises; none where a run goes on from another's state.
        schedule: how the learning rate goes on after that: "cosine" falls to 2% at the end of the run; "constant"
            stays, for runs that others go on from.
        average: share of the steps, the last ones, whose mean the draft's weights are in the end; 0 takes the last.
            The mean does what a falling learning rate does, and the next run goes on from the weights themselves.
        weight_decay: of AdamW.
        num_epochs: passes over the answers.
        min_steps: where these are fewer optimizer steps, as with a small window, passes go on until so many are done.
        max_grad_norm: gradients are clipped to this norm.
        num_threads: of the processor; 0 leaves it to torch.
        loss: what is minimised; by default what the draft's family says, which is what its paper trains it with.
        answers: whose answers are learnt, and what a token of them counts.
        teachers: models beside the target; labels are the mean of their probabilities and the target's.
        step_decay: weight of unroll j is step_decay ** j; by default the family's.
        follow: rows that are unrolled further: "accepted" those right so far, "all" every one; by default the family's.
        batch_tokens: tokens, padding included, of one optimizer step.
        max_minutes: training ends then at the latest, the learning rate's schedule with it.
        checkpoint_s: seconds between checkpoints.
    """

    name: Literal["distill"] = "distill"
    learning_rate: float = Field(1.5e-3, gt=0)
    warmup: float = Field(0.05, ge=0, lt=1)
    schedule: Literal["cosine", "constant"] = "cosine"
    average: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    num_epochs: int = Field(6, ge=1)
    min_steps: int = Field(0, ge=0)
    batch_tokens: int = Field(512, ge=2)
    step_decay: float | None = Field(None, gt=0, le=1)
    follow: Literal["accepted", "all"] | None = None
    max_grad_norm: float = Field(1.0, gt=0)
    max_minutes: float | None = Field(None, gt=0)
    checkpoint_s: float = Field(30.0, ge=0)
    num_threads: int = Field(0, ge=0)
    loss: Annotated[BaseParams | None, catalog.Method("losses")] = None
    answers: Annotated[BaseParams, catalog.Method("answers")] = target.Params()
    teachers: tuple[TeacherParams, ...] = ()

    def over(self, procedure: Procedure) -> Procedure:
        """Return how a family is trained, with what is said here in its place."""
        said = {name: value for name in Procedure._fields if (value := getattr(self, name)) is not None}
        return procedure._replace(**said)


class Progress(NamedTuple):
    """How far a stage is, in tokens, or in answers that are written; `loss` is a running mean of the first unroll's."""

    stage: Literal["answers", "hidden states", "train"]
    done: int
    total: int
    loss: float | None
    tokens_per_s: float


class Report(NamedTuple):
    """What training cost. A token is one of a sequence, prompt included, each epoch anew."""

    tokens_per_s: float
    hidden_tokens_per_s: float
    seconds: float
    num_tokens: int
    num_steps: int
    losses: list[tuple[int, float]]
    peak_memory_mib: float


def train(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    params: Params,
    num_draft_tokens: int,
    work_dir: Path,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
    device: str = "cpu",
    state: Path | None = None,
    state_out: Path | None = None,
    captured: Captures | None = None,
    teacher_dirs: Sequence[Path] = (),
) -> Report:
    """Train `draft` in place.

    Args:
        draft: in float32; parameters that need no gradient stay as they are.
        target_dir: the target that the answers came from.
        samples: prompts with the target's answers of two tokens and more.
        params: the loop's settings.
        num_draft_tokens: K as served; for how many tokens a row is unrolled then is for the draft to say.
        work_dir: holds the hidden states and the checkpoint; a run that finds one there goes on exactly where it was.
        seed: of the order of batches.
        on_progress: called a few times a second at most.
        device: where target and draft run; the draft is moved there.
        state: the end of the run to go on from, as `state_out` of that run; its weights replace the draft's.
        state_out: file to write this run's end to.
        captured: hidden states that need not be computed.
        teacher_dirs: of each of the settings' teachers.

    Raises:
        ValueError: no sample has anything to learn from, K is 0, `state` is of a draft of another shape, or a teacher
            has another vocabulary.
        FloatingPointError: the loss is NaN or infinite; `draft` must be thrown away.
    """
    samples = [s for s in samples if len(s.completion_ids) > 2]
    if not samples:
        raise ValueError("no sample has an answer of more than two tokens")
    if num_draft_tokens < 1:
        raise ValueError(f"a draft is trained for num_draft_tokens from 1; got {num_draft_tokens}")
    if params.num_threads:
        torch.set_num_threads(params.num_threads)
    require_teachers(draft, target_dir, params.teachers, teacher_dirs)
    report = on_progress or (lambda progress: None)
    learnt: HiddenStates | Rounds
    if isinstance(params.answers, Written):
        learnt = Rounds(draft, target_dir, samples, params.answers, num_draft_tokens, work_dir, seed)
    else:
        learnt = hidden_states(
            draft,
            target_dir,
            samples,
            work_dir,
            lambda d, t, r: report(Progress("hidden states", d, t, None, r)),
            device,
            captured,
        )
    draft.to(device)
    loop = _Loop(draft, target_dir, learnt, params, num_draft_tokens, work_dir, seed, teacher_dirs)
    if state is not None:
        loop.go_on_from(state)
    return loop.run(report, state_out)


class _Loop:
    def __init__(
        self,
        draft: Draft,
        target_dir: Path,
        learnt: HiddenStates | Rounds,
        params: Params,
        num_draft_tokens: int,
        work_dir: Path,
        seed: int,
        teacher_dirs: Sequence[Path] = (),
    ) -> None:
        self.draft, self.learnt, self.params, self.seed = draft, learnt, params, seed
        self.work_dir = work_dir
        self.procedure = params.over(draft.procedure)
        require_labels(params.answers, self.procedure.loss)
        self.loss = catalog.load("losses", self.procedure.loss.name)
        self.counts = token_counts(learnt.samples, params.answers)
        require_reader(params.teachers, self.procedure.loss)
        self.teachers = Teachers(draft, target_dir, self.procedure.loss, params.teachers, teacher_dirs)
        self.num_unroll = draft.num_unrolled(num_draft_tokens)
        self.trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(),
            lr=params.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=params.weight_decay,
            fused=True,
        )
        self.buckets = length_buckets(learnt.samples, params.batch_tokens)
        self.total = max(params.num_epochs * len(self.buckets), params.min_steps)
        self.all_tokens = sum(len(s.token_ids) for s in learnt.samples) * self.total // len(self.buckets)
        self.key, self.round = self._key(), -1
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.losses: list[tuple[int, float]] = []
        self.warmup = params.warmup
        self.mean = {name: torch.zeros_like(p) for name, p in self.trained.items()} if params.average else {}
        self.num_averaged = 0

    def go_on_from(self, state: Path) -> None:
        """Take weights and moments over; with moments there is nothing to warm up."""
        load_state(state, self.trained, self.optimizer)
        self.warmup = 0.0

    def run(self, report: Callable[[Progress], None], state_out: Path | None = None) -> Report:
        self._resume()
        if isinstance(self.learnt, HiddenStates):
            self._read(self.learnt, report)
        saved = shown = time.perf_counter()
        mean = self.losses[-1][1] if self.losses else None
        while (done := self._done()) < 1.0:
            self._begin_round(report)
            started = time.perf_counter()
            order = torch.randperm(
                len(self.buckets),
                generator=torch.Generator().manual_seed(self.seed * 1000 + self.step // len(self.buckets)),
            )
            batch = self.buckets[int(order[self.step % len(self.buckets)])]
            value = self._optimize(batch, done)
            mean = value if mean is None else 0.95 * mean + 0.05 * value
            self.step += 1
            self._average()
            self.tokens += sum(len(s.token_ids) for s in batch)
            self.losses.append((self.step, mean))
            now = time.perf_counter()
            self.seconds += now - started
            if now - shown > 0.5 or self.step == self.total:
                shown = now
                report(Progress("train", self.tokens, self.all_tokens, mean, self.tokens / self.seconds))
            if now - saved > self.params.checkpoint_s:
                self._save()
                saved = time.perf_counter()
        if isinstance(self.learnt, Rounds):
            self.learnt.end()
        if state_out is not None:
            save_state(state_out, self.trained, self.optimizer)
        if self.num_averaged:
            with torch.no_grad():
                for name, parameter in self.trained.items():
                    parameter.copy_(self.mean[name])
        self.draft.eval()
        return Report(
            tokens_per_s=self.tokens / max(self.seconds, 1e-9),
            hidden_tokens_per_s=self.learnt.tokens_per_s,
            seconds=self.seconds,
            num_tokens=self.tokens,
            num_steps=self.step,
            losses=self.losses,
            peak_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )

    def _begin_round(self, report: Callable[[Progress], None]) -> None:
        """Where the draft writes, let it write what is learnt from this step on, unless it has."""
        if not isinstance(self.learnt, Rounds) or (number := self.learnt.at(self.step, self.total)) == self.round:
            return
        if self.step:
            self._save()  # nobody goes on from before it: what was written there is removed
        loss = self.losses[-1][1] if self.losses else None
        states = self.learnt.begin(
            number, self.key, lambda stage, done, of, speed: report(Progress(stage, done, of, loss, speed))
        )
        self._read(states, report)
        self.buckets, self.round = length_buckets(self.states.samples, self.params.batch_tokens), number

    def _read(self, states: HiddenStates, report: Callable[[Progress], None]) -> None:
        """Learn from these samples, once all teachers have read them."""
        device, self.states = str(self.draft.vocabulary.device), states
        self.teachers.read(states, device, lambda d, t, r: report(Progress("hidden states", d, t, None, r)))

    def _done(self) -> float:
        """Fraction of the schedule, by steps or by time, whichever is further."""
        by_time = self.seconds / (60 * self.params.max_minutes) if self.params.max_minutes else 0.0
        return max(self.step / self.total, by_time)

    def _optimize(self, batch: list[Sample], done: float) -> float:
        warm = min(1.0, (done + 1 / self.total) / max(self.warmup, 1e-9))
        after = 1.0
        if self.params.schedule == "cosine":
            after = max(0.5 * (1 + torch.cos(torch.tensor(torch.pi * min(done, 1.0)))).item(), 0.02)
        for group in self.optimizer.param_groups:
            group["lr"] = self.params.learning_rate * warm * after
        loss, first = self._loss(batch, done)
        if not torch.isfinite(loss):
            value = float(loss.detach())
            raise FloatingPointError(
                f"the loss is {value} at step {self.step}; the draft is discarded and its parent stays"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained.values(), self.params.max_grad_norm)
        self.optimizer.step()
        return first

    def _loss(self, batch: list[Sample], done: float) -> tuple[Tensor, float]:
        """Return the loss to minimise, the mean over the draft and those nested in it, and its first unroll's mean.

        More rows go on as the draft gets better, so only the latter falls.
        """
        rows, final, log_sums, lengths = pack(batch, self.states, self.num_unroll, self.draft)
        # By the step, so that a resumed run draws what the unbroken one would.
        rng = torch.Generator(final.device).manual_seed(self.seed * 1_000_003 + self.step)
        rows = rows._replace(rng=rng, done=done)
        last = lengths[rows.sequence] - 1

        def came(step: int, running: Tensor) -> Tensor:
            return rows.token_ids[rows.sequence[running], rows.index[running] + 2 + step]

        def keep(step: int, running: Tensor, logits: Tensor) -> Tensor:
            going = rows.index[running] + 3 + step <= last[running]
            if self.procedure.follow == "accepted":
                going &= self._choice(logits) == came(step, running)
            return going

        counts, word = self._padded_counts(batch, final.device), self.teachers.say(batch, (final, log_sums))

        def of(unrolls: Sequence[Unrolled]) -> tuple[Tensor, float]:
            total, first = torch.zeros((), device=final.device), 0.0
            own = torch.ones_like(rows.index, dtype=torch.bool)
            for step, unrolled in enumerate(unrolls):
                running = unrolled.running
                if len(running) == 0:
                    break
                sequence, position = rows.sequence[running], rows.index[running] + 1 + step
                places = sequence, position
                drafted = self.teachers.drafted(step, unrolled, came(step, running), own[running], word, places)
                values = self.loss.loss(drafted, self.procedure.loss)
                if unrolled.added is not None:
                    values = values + unrolled.added
                counted = values if counts is None else values * counts[sequence, position + 1]
                total = total + self.procedure.step_decay**step * counted.sum()
                if step == 0:
                    first = float(values.detach().mean())
                if "on_policy" in self.loss.NEEDS:
                    own[running] &= self._choice(unrolled.logits) == came(step, running)
            return total / len(rows.index), first

        parts = [of(unrolls) for unrolls in self.draft.unroll_all(rows, self.num_unroll, keep)]
        return torch.stack([loss for loss, _ in parts]).mean(), parts[0][1]

    def _padded_counts(self, batch: Sequence[Sample], device: torch.device) -> Tensor | None:
        """Return [B, T] what each token counts, None where all count the same."""
        if not self.counts:
            return None
        of_batch = [self.counts[sample.id] for sample in batch]
        return torch.nn.utils.rnn.pad_sequence(of_batch, batch_first=True).to(device)

    def _choice(self, logits: Tensor) -> Tensor:
        """[n, D] → [n] the target ids that the draft would have proposed."""
        return self.draft.vocabulary[logits.argmax(-1)]

    def _average(self) -> None:
        """Take the step that was done into the mean, if it is one of the last."""
        if not self.mean or self._done() < 1 - self.params.average:
            return
        self.num_averaged += 1
        with torch.no_grad():
            for name, parameter in self.trained.items():
                self.mean[name] += (parameter - self.mean[name]) / self.num_averaged

    def _save(self) -> None:
        progress = {
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "losses": self.losses,
            "num_averaged": self.num_averaged,
            "key": self.key,
        }
        save_progress(self.work_dir, self.trained, self.optimizer, progress, self.mean)

    def _resume(self) -> None:
        progress = load_progress(self.work_dir, self.trained, self.optimizer, self.key, self.mean)
        if progress is not None:
            self.step, self.seconds, self.tokens = progress["step"], progress["seconds"], progress["tokens"]
            self.num_averaged = progress["num_averaged"]
            self.losses = [(step, loss) for step, loss in progress["losses"]]

    def _key(self) -> str:
        """What must be equal for a checkpoint to be this run's."""
        settings = self.params.model_copy(update=self.procedure._asdict()).model_dump(
            exclude={"num_threads", "checkpoint_s"}
        )
        ids = [[s.id for s in bucket] for bucket in self.buckets]
        return json.dumps([settings, self.num_unroll, self.seed, ids], sort_keys=True)
