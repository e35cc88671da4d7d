"""What every stage that makes another target of a target shares: load, change, save, measure on held-out text, log."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from transformers import PreTrainedModel

from infra.artifacts import Artifact, open_artifact
from infra.registry import open_registry
from infra.settings import load_settings
from infra.views.charts import draw_losses
from models.core.checkpoints import invariants
from models.core.checkpoints.loading import complete, load_floats, load_model, save_model
from models.core.evaluation import perplexity
from models.core.layers.linears import ENOUGH, enough_tokens
from models.core.learning import training
from models.stages import Train
from models.targets import target_config
from models.types import Frozen
from tasks.prepare_text import first_of_each, read_documents, tokenise
from tasks.stages import cached_step, progress, run_logger, table
from tasks.stages.throttle import throttled
from tasks.stages.workers import Run, train_module

Losses = Sequence[tuple[int, float]]
FrozenT = TypeVar("FrozenT", bound=Frozen)


class Start(NamedTuple):
    """What a stage works on.

    Attributes:
        model: the target in float32, on the settings' device.
        train: domain to token ids.
        work: lasts until the stage is complete, so that a killed run is resumed.
        workers: processes that train; None for this one.
    """

    model: PreTrainedModel
    train: dict[str, list[list[int]]]
    work: Path
    on_progress: training.OnProgress
    workers: Train | None = None

    def run(self, model: PreTrainedModel, run: Run[training.Progress, training.Trained]) -> training.Trained:
        """Train a model by `run`, see `tasks.stages.workers`."""
        return train_module(self.workers, model, run, self.work, self.on_progress)

    def calibration(self, num_documents: int, max_length: int) -> list[list[int]]:
        """Return documents to calibrate on, the domains in turn; ValueError if there are fewer.

        Warns where they are too few to be relied on.
        """
        documents = first_of_each(self.train, num_documents, max_length)
        num_tokens, enough = sum(map(len, documents)), enough_tokens(self.model)
        if num_tokens < enough:
            told = "calibrated on %d tokens; %d are %d times the widest layer's inputs, with fewer figures mislead"
            run_logger().warning(told, num_tokens, enough, ENOUGH)
        return documents

    @property
    def documents(self) -> list[list[int]]:
        """The training documents of all domains."""
        return [document for of_domain in self.train.values() for document in of_domain]


class Changed(NamedTuple):
    """What came of it: a model that computes as the new target, and what its method says of itself.

    `losses` are (step, running mean) of training; `save` writes config and weights into a directory, by default the
    model's own in the old target's format; `files` are kept with the run in MLflow.
    """

    model: PreTrainedModel
    metrics: Mapping[str, float]
    losses: Losses = ()
    save: Callable[[Path], None] | None = None
    files: Sequence[Path] = ()


def change_target(
    stage: str,
    settings: FrozenT,
    seed: int,
    target: Artifact,
    text: Artifact,
    code: Sequence[object],
    change: Callable[[FrozenT, int, Start], Changed],
    workers: Train | None = None,
) -> Artifact:
    """Return the target that a stage makes of another, made now unless a good one is there; of kind "target".

    `stage` is its table's name, `settings` that table. `change` may use up the model; where it trains, `workers` do so.
    ValueError as `store`.
    """

    def make(directory: Path, work: Path) -> None:
        target_dir, text_dir = open_artifact(target), open_artifact(text)
        model = load_model(target_dir, device=load_settings().device)
        with progress(f"{stage} the target") as show:
            train = tokenise(read_documents(text_dir, "train"), target_dir)
            changed = change(settings, seed, Start(model, train, work, shown_by(show), workers))
        losses = held_out_losses(changed.model, tokenise(read_documents(text_dir, "held_out"), target_dir))
        store(changed, directory, target_dir)
        rows = [{"domain": domain, "nats a token": round(loss, 4)} for domain, loss in losses.items()]
        table(f"{stage}-held-out", rows, f"held-out loss after {stage}")
        figures = [draw_losses(changed.losses, work / "losses.svg")] if changed.losses else []
        metrics = {**changed.metrics, **{f"held_out/{domain}": loss for domain, loss in losses.items()}}
        open_registry().store.record_run(stage, settings.model_dump(mode="json"), metrics, [*figures, *changed.files])

    params = {"settings": settings.model_dump(mode="json", exclude={"checkpoint_s"}), "seed": seed}
    return cached_step(stage, "target", params, throttled(make), {"target": target, "text": text}, (tokenise, *code))


def store(changed: Changed, directory: Path, target_dir: Path) -> None:
    """Write a changed target into an empty directory, as an engine loads it.

    Raises:
        ValueError: what is stored breaks, or says nothing of, what an earlier stage promised of the weights, see
            `models.core.checkpoints.invariants`.
    """
    invariants.require_noted(target_config(target_dir), changed.model.config)
    if changed.save is None:
        save_model(changed.model, directory, target_dir)
    else:
        changed.save(directory)
        complete(directory, target_dir)
    if any(invariants.noted(changed.model.config)):
        invariants.require(load_floats(directory))


def shown_by(show: Callable[[float, float, str], None], note: str = "") -> training.OnProgress:
    """Return what hands the progress of training on to `show`, under a note."""

    def on_progress(now: training.Progress) -> None:
        loss = "" if now.loss is None else f", loss {now.loss:.3f}"
        show(now.done, now.total, f"{note}{now.tokens_per_s:.0f} tokens/s{loss}")

    return on_progress


def training_metrics(trained: training.Trained) -> dict[str, float]:
    """Return what training was, for MLflow."""
    counts = {"tokens": trained.num_tokens, "steps": trained.num_steps, "skipped_steps": trained.num_skipped}
    return {**{name: float(count) for name, count in counts.items()}, "seconds": trained.seconds, **trained.figures}


def held_out_losses(model: PreTrainedModel, documents: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, float]:
    """Return domain to nats a token."""
    return {domain: perplexity.nats_per_token(perplexity.score(model, each)) for domain, each in documents.items()}
