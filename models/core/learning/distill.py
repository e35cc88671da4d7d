"""Distillation, in the one training loop: a draft learns to say what the target would say next.

Two things make it cheap. The target runs once per sequence (`models.core.learning.hidden`). And of the unrolled steps
only those rows run whose earlier drafted tokens were right. When one is wrong, serving throws the rest of the block
away, so what the draft would have said next is never read. The work per token follows the acceptance rate instead of K.
"""

import json
import resource
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from models import catalog
from models.answers import RolloutSource, require_labels, target, token_counts
from models.core.layers.kernels import require_device
from models.core.learning import fitted
from models.core.learning.captured import Captures
from models.core.learning.hidden import HiddenStates, Sample, hidden_states, length_buckets, pack
from models.core.learning.loop import ALONE, Averaged, Loop, Workers
from models.core.learning.teacher import TeacherParams, Teachers, require_reader, require_teachers
from models.core.learning.validation import Validation, split
from models.drafts import Draft, Procedure, Unrolled
from models.params import BaseParams
from models.types import MIN_COMPLETION


class Params(BaseParams):
    """Settings of the loop, and which heads are fit behind it.

    Attributes:
        lengths: a length policy with a head, such as `specdec_pp`, that is fit to the draft on answers kept from it,
            and that the reference engine finds beside the draft, where [engine] names it too.
        verify: a rule with a head, such as `judge`, the same.
        validation: share of each domain's answers, whole clusters of them, that is kept from the draft to tell after
            each pass how good it is; the best pass's weights stay. With 0, or where each cluster is larger than the
            share, all passes are made and the last weights stay. In a refresh only the window's own answers are kept.
        patience: passes in a row without a better draft after which training ends.
        learning_rate: of AdamW, at its highest.
        warmup: share of the steps in which the learning rate rises; none where a run goes on from another's state.
        schedule: how the learning rate goes on after that: "cosine" falls to 2% at the end of the run; "constant"
            stays, for runs that others go on from.
        average: share of the steps, the last ones, whose mean the draft's weights are in the end; 0 takes the last.
            The mean does what a falling learning rate does, and the next run goes on from the weights themselves. With
            `validation` it is the share of each pass.
        weight_decay: of AdamW.
        num_epochs: passes over the answers; with `validation` the most there are.
        min_steps: where these are fewer optimizer steps, as with a small window, passes go on until so many are done.
        max_grad_norm: gradients are clipped to this norm.
        num_threads: of the processor; 0 leaves it to torch.
        device: what trains, and what a refresh is gated on: "cpu", "cuda" or one of several, "cuda:1"; by default
            REDRAFT_DEVICE.
        loss: what is minimised; by default what the draft's family says, which is what its paper trains it with.
        answers: whose answers are learnt, and what a token of them counts.
        teachers: models beside the target; labels are the mean of their probabilities and the target's.
        step_decay: weight of unroll j is step_decay ** j; by default the family's.
        follow: rows that are unrolled further: "accepted" those right so far, "all" every one; by default the family's.
        batch_tokens: tokens, padding included, of one optimizer step.
        max_length: tokens of a text that are learnt, its end left out; by default as many as 99 texts in 100 have, or a
            step takes, whichever is more.
        max_minutes: training ends then at the latest, the learning rate's schedule with it.
        checkpoint_s: seconds between checkpoints.
    """

    name: Literal["distill"] = "distill"
    lengths: Annotated[BaseParams | None, catalog.Method("lengths")] = None
    verify: Annotated[BaseParams | None, catalog.Method("verify")] = None
    validation: float = Field(0.0, ge=0, le=0.5)
    patience: int = Field(2, ge=1)
    learning_rate: float = Field(1.5e-3, gt=0)
    warmup: float = Field(0.05, ge=0, lt=1)
    schedule: Literal["cosine", "constant"] = "cosine"
    average: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    num_epochs: int = Field(6, ge=1)
    min_steps: int = Field(0, ge=0)
    batch_tokens: int = Field(512, ge=2)
    max_length: int | None = Field(None, ge=4)
    step_decay: float | None = Field(None, gt=0, le=1)
    follow: Literal["accepted", "all"] | None = None
    max_grad_norm: float = Field(1.0, gt=0)
    max_minutes: float | None = Field(None, gt=0)
    checkpoint_s: float = Field(30.0, ge=0)
    num_threads: int = Field(0, ge=0)
    device: str = Field("", pattern=r"^(cpu|cuda(:\d+)?)?$")
    loss: Annotated[BaseParams | None, catalog.Method("losses")] = None
    answers: Annotated[BaseParams, catalog.Method("answers")] = target.Params()
    teachers: tuple[TeacherParams, ...] = ()

    @field_validator("lengths", "verify")
    @classmethod
    def _has_a_head(cls, method: BaseParams | None, info: ValidationInfo) -> BaseParams | None:
        if method is not None:
            fitted.require(str(info.field_name), method)
        return method

    @property
    def heads(self) -> list[tuple[str, BaseParams]]:
        """Family and settings of each head that is fit."""
        both = ("lengths", self.lengths), ("verify", self.verify)
        return [(family, params) for family, params in both if params is not None]

    def over(self, procedure: Procedure) -> Procedure:
        """Return how a family is trained, with what is said here in its place."""
        said = {name: value for name in Procedure._fields if (value := getattr(self, name)) is not None}
        return procedure._replace(**said)


class Progress(NamedTuple):
    """How far a stage is, in tokens, or in answers that are written; `loss` is a running mean of the first unroll's.

    `tau` is that of the last look at the answers kept for validation, in tokens a step; None before there was one.
    """

    stage: Literal["answers", "hidden states", "train"]
    done: int
    total: int
    loss: float | None
    tokens_per_s: float
    tau: float | None = None


class Report(NamedTuple):
    """What training cost. A token is one of a sequence, prompt included, each epoch anew.

    `taus` are (steps done, τ) of the looks at `num_validated` answers kept from it; the draft is as at the best.
    """

    tokens_per_s: float
    hidden_tokens_per_s: float
    seconds: float
    num_tokens: int
    num_steps: int
    losses: list[tuple[int, float]]
    peak_memory_mib: float
    num_validated: int
    taus: Sequence[tuple[int, float]]


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
    unseen: Collection[str] | None = None,
    workers: Workers = ALONE,
) -> Report:
    """Train `draft`, in float32, in place; parameters that need no gradient stay as they are.

    Args:
        samples: prompts with the target's answers of two tokens and more.
        num_draft_tokens: K as served; for how many tokens a row is unrolled then is for the draft to say.
        work_dir: holds the hidden states and the checkpoint; a run that finds one there goes on exactly where it was.
        seed: of the order of batches.
        on_progress: called a few times a second at most.
        device: where target and draft run; the draft is moved there.
        state: the end of the run to go on from, as `state_out` of that run; its weights replace the draft's.
        state_out: file to write this run's end to.
        captured: hidden states that need not be computed.
        teacher_dirs: of each of the settings' teachers.
        unseen: ids of the samples that the draft has learnt nothing of, which may be kept for validation; None for all.
        workers: the processes that train it together, each called with the same and a `work_dir` of its own. Only the
            first one's draft is the result.

    Raises:
        ValueError: no sample has anything to learn from, K is 0, the device is not here, `state` is of a draft of
            another shape, a teacher has another vocabulary, or several processes were to learn what the draft writes.
        FloatingPointError: the loss is NaN or infinite; `draft` must be thrown away.
    """
    samples = [s for s in samples if len(s.completion_ids) >= MIN_COMPLETION]
    if not samples:
        raise ValueError("no sample has an answer of more than two tokens")
    if num_draft_tokens < 1:
        raise ValueError(f"a draft is trained for num_draft_tokens from 1; got {num_draft_tokens}")
    require_device(device)
    if params.num_threads:
        torch.set_num_threads(params.num_threads)
    require_teachers(draft, target_dir, params.teachers, teacher_dirs)
    report = on_progress or (lambda progress: None)
    samples, kept = split(samples, params.validation, seed, unseen)
    learnt: HiddenStates | RolloutSource
    source = catalog.load("answers", params.answers.name)
    if source.WRITES:
        if workers.size > 1:
            raise ValueError(f'answers "{params.answers.name}" are written by the draft itself, in one process')
        learnt = source.ROUNDS(draft, target_dir, samples, params.answers, num_draft_tokens, work_dir, seed)
    else:
        batches = length_buckets(samples, params.batch_tokens)
        own = [sample for batch in batches for sample in workers.share(batch)[0]]
        learnt = hidden_states(
            draft,
            target_dir,
            own + kept if workers.is_first else own,
            work_dir,
            lambda d, t, r: report(Progress("hidden states", d, t, None, r)),
            device,
            captured,
        )
        learnt.samples = samples
    draft.to(device)
    loop = _Loop(
        draft, target_dir, learnt, params, num_draft_tokens, work_dir, seed, teacher_dirs, kept, report, workers
    )
    return loop.run(state, state_out)


class _Step(nn.Module):
    """A draft's loss as a module's output, which is what `DistributedDataParallel` joins the gradients of."""

    def __init__(self, draft: Draft, loss: Callable[[Sequence[Sample], float, int], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.draft, self._loss = draft, loss

    def forward(self, batch: Sequence[Sample], done: float, num_rows: int) -> tuple[Tensor, Tensor]:
        return self._loss(batch, done, num_rows)


class _Loop(Loop[list[Sample]]):
    lost = "the draft is discarded and its parent stays"

    def __init__(
        self,
        draft: Draft,
        target_dir: Path,
        learnt: HiddenStates | RolloutSource,
        params: Params,
        num_draft_tokens: int,
        work_dir: Path,
        seed: int,
        teacher_dirs: Sequence[Path],
        kept: Sequence[Sample],
        show: Callable[[Progress], None],
        workers: Workers = ALONE,
    ) -> None:
        trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        super().__init__(trained, params, seed, work_dir, workers)
        self.draft, self.learnt, self.params, self.show = draft, learnt, params, show
        self.joined = workers.joined(_Step(draft, self._loss))
        assert draft.procedure is not None  # or there are no weights to learn
        self.procedure = params.over(draft.procedure)
        require_labels(params.answers, self.procedure.loss)
        self.counts = token_counts(learnt.samples, params.answers)
        require_reader(params.teachers, self.procedure.loss)
        self.teachers = Teachers(draft, target_dir, self.procedure.loss, params.teachers, teacher_dirs)
        self.num_unroll = draft.num_unrolled(num_draft_tokens)
        self.losses_of = catalog.load("losses", self.procedure.loss.name).loss
        self.batches = length_buckets(learnt.samples, params.batch_tokens)
        self.total = max(params.num_epochs * len(self.batches), params.min_steps)
        self.all_tokens = sum(len(s.token_ids) for s in learnt.samples) * self.total // len(self.batches)
        settings = params.model_copy(update=self.procedure._asdict()).model_dump(
            exclude={"num_threads", "checkpoint_s", "device"}
        )
        ids = [[s.id for s in bucket] for bucket in self.batches]
        self.key = json.dumps([settings, self.num_unroll, seed, ids], sort_keys=True)
        self.round, self.warmup = -1, params.warmup
        self.averaged = Averaged(self.trained, params.average > 0)
        steps = len(self.batches)
        self.validation = Validation(draft, target_dir, kept, num_draft_tokens, params.patience, steps, work_dir)

    def run(self, state: Path | None, state_out: Path | None) -> Report:
        if state is not None:
            self.load_state(state)
            self.warmup = 0.0  # there are moments
        self.resume()
        if isinstance(self.learnt, HiddenStates):
            self._read(self.learnt)
        self.run_steps()
        if not isinstance(self.learnt, HiddenStates):
            self.learnt.end()
        if self.workers.is_first and (best := self.validation.put_back(self)) is not None:
            self.averaged.number = best["number"]
        if state_out is not None:
            self.save_state(state_out)
        self.averaged.put()
        self.draft.eval()
        return Report(
            tokens_per_s=self.num_tokens / max(self.seconds, 1e-9),
            hidden_tokens_per_s=self.learnt.tokens_per_s,
            seconds=self.seconds,
            num_tokens=self.num_tokens,
            num_steps=self.step,
            losses=self.losses,
            peak_memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            num_validated=len(self.validation.samples),
            taus=self.validation.taus,
        )

    def is_over(self) -> bool:
        return self._done() >= 1.0 or self.validation.is_over

    def report(self) -> None:
        tau, speed = self.validation.taus[-1][1] if self.validation.taus else None, self.num_tokens / self.seconds
        self.show(Progress("train", self.num_tokens, self.all_tokens, self.losses[-1][1], speed, tau))

    def before_step(self) -> None:
        """Where the draft writes, let it write what is learnt from this step on, unless it has."""
        if isinstance(self.learnt, HiddenStates) or (number := self.learnt.at(self.step, self.total)) == self.round:
            return
        if self.step:
            self.save()  # nobody goes on from before it: what was written there is removed
        loss = self.losses[-1][1] if self.losses else None
        states = self.learnt.begin(
            number, self.key, lambda stage, done, of, speed: self.show(Progress(stage, done, of, loss, speed))
        )
        self._read(states)
        self.batches, self.round = length_buckets(states.samples, self.params.batch_tokens), number

    def _read(self, states: HiddenStates) -> None:
        """Learn from these samples, once all teachers have read them."""
        device, self.states = str(self.draft.vocabulary.device), states
        self.teachers.read(states, device, lambda d, t, r: self.show(Progress("hidden states", d, t, None, r)))

    def _done(self) -> float:
        """Fraction of the schedule, by steps or by time, whichever is further."""
        by_time = self.seconds / (60 * self.params.max_minutes) if self.params.max_minutes else 0.0
        return max(self.step / self.total, by_time)

    def advance(self, batch: list[Sample]) -> float:
        done, after = self._done(), 1.0
        warm = min(1.0, (done + 1 / self.total) / max(self.warmup, 1e-9))
        if self.params.schedule == "cosine":
            after = max(0.5 * (1 + torch.cos(torch.tensor(torch.pi * min(done, 1.0)))).item(), 0.02)
        self.begin_step(self.params.learning_rate * warm * after)
        share, weight = self.workers.share(batch)
        num_rows = sum(len(one.completion_ids) - 1 for one in batch)  # see `pack`
        loss, first = self.joined(share, done, num_rows)
        total, first_mean = self.workers.sum(weight * float(loss.detach()), weight * float(first))
        self.require_finite(total)
        (loss if self.workers.size == 1 else weight * self.workers.size * loss).backward()
        self.descend()
        return first_mean

    def _loss(self, batch: Sequence[Sample], done: float, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the loss to minimise, the mean over the draft and those nested in it, and its first unroll's mean.

        Both are sums over a share of a batch, divided by the rows of all of it. More rows go on as the draft gets
        better, so only the latter falls. Random choices are made by the optimizer's step: a resumed run draws what the
        unbroken one would.
        """
        rows, final, log_sums, lengths = pack(batch, self.states, self.num_unroll, self.draft)
        seed = self.seed * 1_000_003 + self.step + 1_000_000_007 * self.workers.rank
        rng = torch.Generator(final.device).manual_seed(seed)
        rows = rows._replace(rng=rng, done=done)
        last = lengths[rows.sequence] - 1

        def came(step: int, running: Tensor) -> Tensor:
            return rows.token_ids[rows.sequence[running], rows.index[running] + 2 + step]

        def keep(step: int, running: Tensor, logits: Tensor) -> Tensor:
            going = rows.index[running] + 3 + step <= last[running]
            if self.procedure.follow == "accepted":
                going &= self.draft.vocabulary[logits.argmax(-1)] == came(step, running)
            return going

        word = self.teachers.say(batch, (final, log_sums))
        counts = pad_sequence([self.counts[one.id] for one in batch], True).to(final.device) if self.counts else None

        def of(unrolls: Sequence[Unrolled]) -> tuple[Tensor, Tensor]:
            total = first = torch.zeros((), device=final.device)
            for step, unrolled in enumerate(unrolls):
                running = unrolled.running
                if len(running) == 0:
                    break
                sequence, position = rows.sequence[running], rows.index[running] + 1 + step
                drafted = self.teachers.drafted(unrolled, came(step, running), word, (sequence, position))
                values = self.losses_of(drafted, self.procedure.loss)
                if unrolled.added is not None:
                    values = values + unrolled.added
                if step == 0:
                    first = values.detach().sum() / num_rows
                if counts is not None:
                    values = values * counts[sequence, position + 1]
                total = total + self.procedure.step_decay**step * values.sum()
            return total / num_rows, first

        parts = [of(unrolls) for unrolls in self.draft.unroll_all(rows, self.num_unroll, keep)]
        return torch.stack([loss for loss, _ in parts]).mean(), parts[0][1]

    def after_step(self, batch: list[Sample]) -> None:
        """Take the step into the mean, if it is one of the last: of the run, or of a validated pass."""
        self.num_tokens += sum(len(s.token_ids) for s in batch)
        if not self.params.average:
            return
        done = self.validation.place(self.step) if self.validation.samples else self._done()
        if done >= 1 - self.params.average:
            self.averaged.add()
        else:
            self.averaged.begin()

    def looked(self) -> bool:
        """Look at the draft as it would be kept, and write what it is before anything says that it is the best."""
        if not self.validation.is_due(self.step, at_end=self._done() >= 1.0):
            return False
        started = time.perf_counter()
        with self.averaged.in_place():
            is_best = self.validation.look(self.step, self.workers)
        if is_best:
            self.validation.keep(self, {"number": self.averaged.number})
        self.seconds += self.workers.agree(time.perf_counter() - started)[0]
        self.save()
        self.validation.forget_others()
        return True

    def state(self) -> dict[str, Any]:
        return {"num_averaged": self.averaged.number, "taus": self.validation.taus}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.averaged.number = state["num_averaged"]
        self.validation.taus = [(step, tau) for step, tau in state["taus"]]

    def extra(self) -> Mapping[str, Tensor]:
        return self.averaged.tensors
