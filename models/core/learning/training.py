"""The training of language models: next-token cross-entropy in the one loop, changed by the hooks of regimes.

Pretraining, finetuning, proxies and continued training after shrinking all run it. It trains whatever parameters of the
model need a gradient, in the order that a seed gives, and a killed run goes on exactly where it was. Zeroes of a pruned
model stay zero.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints.invariants import Holding, note_zeroes
from models.core.learning.hidden import batches_of
from models.core.learning.loop import ALONE, Loop, Workers
from models.params import BaseParams, TrainingParams
from models.regimes import Batch, Regime
from models.together import Declared, declared, require_compatible, require_kept

IGNORED = -100


class Progress(NamedTuple):
    """How far training is, in tokens, those of steps left out too; `loss` is a running mean in nats a token."""

    done: int
    total: int
    loss: float | None
    tokens_per_s: float


class Trained(NamedTuple):
    """What training was."""

    losses: list[tuple[int, float]]  # (step, running mean in nats a token) of each step that ran
    num_tokens: int  # learnt, each epoch anew
    num_steps: int  # that ran
    num_skipped: int  # steps that a regime left out
    seconds: float  # in steps
    figures: dict[str, float]  # what regimes say of themselves


OnProgress = Callable[[Progress], None]


def train(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    params: TrainingParams,
    regimes: Sequence[Regime] = (),
    seed: int = 0,
    work_dir: Path | None = None,
    on_progress: OnProgress | None = None,
    label: str = "",
    workers: Workers = ALONE,
) -> Trained:
    """Train `model`, in float32 and on its device, in place; parameters that need no gradient stay as they are.

    Args:
        documents: token ids; those of one token have nothing to learn and are left out.
        regimes: hooks, in the order in which they are called.
        seed: of the order of batches.
        work_dir: holds the checkpoint; None keeps none.
        on_progress: called a few times a second at most.
        label: what else makes this run another than one whose checkpoint is found, such as the regimes' settings.
        workers: the processes that train it together, each called with the same and a `work_dir` of its own.

    Raises:
        ValueError: nothing to learn from, no parameter to train, or regimes that several processes can't have.
        FloatingPointError: the loss is NaN or infinite; the model must be thrown away.
    """
    show = on_progress or (lambda progress: None)
    if workers.sharded and regimes:
        raise ValueError(f"each process has a share of the weights, and {_named(regimes)} changes whole ones")
    return _Loop(model, documents, params, [Holding(), *regimes], seed, work_dir, label, show, workers).run()


def train_by_name(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    params: TrainingParams,
    methods: Sequence[BaseParams],
    seed: int = 0,
    work_dir: Path | None = None,
    on_progress: OnProgress | None = None,
    more: Sequence[Regime] = (),
    workers: Workers = ALONE,
) -> Trained:
    """Train with regimes as a recipe names them; see `train`. Zeroes that one of them makes are noted as promised.

    Args:
        methods: settings of methods of family `regimes` that go together (`require_compatible`); may be empty.
        more: hooks beside theirs.

    Raises:
        ValueError: as `train`, a method rewrites weights and some are frozen, or `more` comes beside a method that is
            a loop of its own.
    """
    require_compatible(methods)
    found = [declared("regimes", method, f'regime "{method.name}"') for method in methods]
    if frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        for one in found:
            require_kept([Declared(f"this model, such as {frozen[0]}", (), ("frozen weights",)), one])
    modules = [(catalog.load("regimes", method.name), method) for method in methods]
    loops = [(module, method) for module, method in modules if "loop" in module.CHANGES]
    trained: Trained
    if loops:
        module, method = loops[0]
        if more or workers.size > 1:
            raise ValueError(f'regime "{method.name}" is a loop of its own: it takes one process and no other hooks')
        trained = module.train(model, documents, method, params, seed, work_dir, on_progress)
    else:
        hooks = [
            module.Hooks(method, torch.Generator().manual_seed(1000 * seed + number))
            for number, (module, method) in enumerate(modules)
        ]
        label = json.dumps([method.model_dump(mode="json") for method in methods], sort_keys=True)
        trained = train(model, documents, params, [*hooks, *more], seed, work_dir, on_progress, label, workers)
    if any("zeroes" in one.keeps for one in found):
        note_zeroes(model)
    return trained


def pad(documents: Sequence[Sequence[int]]) -> Batch:
    """Return a batch with one document a row, padded on the right."""
    texts = [torch.tensor(document, dtype=torch.int64) for document in documents]
    return Batch(pad_sequence(texts, True), pad_sequence(texts, True, IGNORED))


def cut(documents: Sequence[Sequence[int]], max_length: int) -> list[list[int]]:
    """Cut documents into pieces of `max_length` tokens, but none of one token; ValueError if nothing is left."""
    pieces = [
        list(document[start : start + max_length])
        for document in documents
        for start in range(0, len(document), max_length)
    ]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise ValueError(f"none of {len(documents)} documents has two tokens; there is nothing to learn from")
    return pieces


class _Loop(Loop[list[list[int]]]):
    lost = "the model is discarded"

    def __init__(
        self,
        model: PreTrainedModel,
        documents: Sequence[Sequence[int]],
        params: TrainingParams,
        regimes: Sequence[Regime],
        seed: int,
        work_dir: Path | None,
        label: str,
        show: OnProgress,
        workers: Workers,
    ) -> None:
        self.model, self.params, self.regimes, self.show = model, params, regimes, show
        workers.shard(model)
        pieces = cut(documents, params.max_length)
        grouped = (regime.batches(pieces, params.batch_tokens) for regime in regimes)
        self.batches = next((own for own in grouped if own is not None), batches_of(pieces, len, params.batch_tokens))
        self.total = params.num_epochs * len(self.batches)
        own = [parameter for regime in regimes for parameter in regime.start(model, self.total) or ()]
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        known = {id(parameter) for parameter in trained.values()}
        if workers.size > 1 and any(id(parameter) not in known for parameter in own):
            raise ValueError(f"{_named(regimes)} trains parameters of its own, which takes one process")
        trained |= {f"regime/{number}": p for number, p in enumerate(own) if id(p) not in known}
        if not trained:
            raise ValueError("no parameter of the model needs a gradient, so there is nothing to train")
        super().__init__(trained, params, seed, work_dir, workers)
        self.joined = workers.joined(model)
        for regime in regimes:
            regime.hold(self.optimizer)
        settings, names = params.model_dump(exclude={"checkpoint_s"}), [type(regime).__module__ for regime in regimes]
        # Of integers, so that it is the same in every process.
        digest = hash(tuple(tuple(map(tuple, batch)) for batch in self.batches))
        self.key = json.dumps([settings, names, label, seed, sorted(trained), digest])
        self.num_skipped, self.stopped = 0, False
        self.all_tokens = params.num_epochs * sum(len(piece) for batch in self.batches for piece in batch)

    def run(self) -> Trained:
        self.model.train()
        self.resume()
        self.run_steps()
        for regime in reversed(self.regimes):
            regime.finish(self.model)
        self.model.eval()
        figures = {name: value for regime in self.regimes for name, value in regime.figures().items()}
        return Trained(self.losses, self.num_tokens, len(self.losses), self.num_skipped, self.seconds, figures)

    def is_over(self) -> bool:
        return self.step >= self.total or self.stopped

    def report(self) -> None:
        loss = self.losses[-1][1] if self.losses else None
        done = self.all_tokens * self.step // self.total
        self.show(Progress(done, self.all_tokens, loss, self.num_tokens / self.seconds))

    def advance(self, documents: list[list[int]]) -> float | None:
        wanted = [regime.runs(self.step) for regime in self.regimes]  # each is asked: one that draws must keep in step
        if not all(wanted):
            self.num_skipped += 1
            return None
        share, weight = self.workers.share(documents)
        batch = next((b for regime in self.regimes if (b := regime.collate(share)) is not None), None)
        batch = Batch._make(one if one is None else one.to(self.model.device) for one in batch or pad(share))
        counts = batch.num_tokens, float((batch.labels[:, 1:] != IGNORED).sum())  # the model's mean is over the latter
        num_tokens, num_labels = self.workers.sum(*(weight * count for count in counts))
        weight *= counts[1] / num_labels
        self.begin_step(learning_rate(self.params, self.step, self.total))
        with ExitStack() as stack:
            for regime in self.regimes:
                stack.enter_context(regime.around(self.step))
            output = self.joined(
                input_ids=batch.token_ids, position_ids=batch.position_ids, labels=batch.labels, use_cache=False
            )
            (value,) = self.workers.sum(weight * float(output.loss.detach()))
            loss = output.loss if self.workers.size == 1 else weight * self.workers.size * output.loss
            for regime in self.regimes:
                if (penalty := regime.penalty(self.model, batch)) is not None:
                    loss = loss + penalty
            self.require_finite(value + float(loss.detach()))
            if loss.requires_grad:  # else a regime left out every block that is trained
                loss.backward()
        for regime in self.regimes:
            regime.after_backward(self.model)
        self.descend()
        for regime in self.regimes:
            regime.after_step(self.model)
        self.num_tokens += int(num_tokens)
        return value

    def after_step(self, documents: list[list[int]]) -> None:
        if self.step % len(self.batches) == 0:
            epoch = self.step // len(self.batches) - 1
            ended = [regime.after_epoch(self.model, epoch) for regime in self.regimes]
            self.stopped = any(ended)

    def state(self) -> dict[str, Any]:
        return {"num_skipped": self.num_skipped, "regimes": [regime.state() for regime in self.regimes]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.num_skipped = state["num_skipped"]
        for regime, own in zip(self.regimes, state["regimes"], strict=True):
            regime.restore(own)


def _named(regimes: Sequence[Regime]) -> str:
    return " or ".join(sorted({type(one).__module__.rpartition(".")[2] for one in regimes}))


def num_steps(documents: Sequence[Sequence[int]], params: TrainingParams) -> int:
    """Return how many steps training takes that no regime changes."""
    return params.num_epochs * len(batches_of(cut(documents, params.max_length), len, params.batch_tokens))


def learning_rate(params: TrainingParams, step: int, total: int) -> float:
    """Return the rate of a step: a linear rise, then half a cosine down to 2%."""
    warm = min(1.0, (step + 1) / max(params.warmup * total, 1.0))
    return params.learning_rate * warm * max(0.5 * (1 + math.cos(math.pi * step / total)), 0.02)
