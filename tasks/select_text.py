"""Choose the documents that are worth training on, asked of a small proxy."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infra.artifacts import Artifact, open_artifact
from infra.settings import load_settings
from models import catalog, select
from models.core.checkpoints.loading import load_model
from models.core.learning import training
from models.drafts import lm
from models.stages import Select
from models.targets import describe
from tasks.prepare_text import read_documents, tokenise, write_documents
from tasks.stages import cached_step, progress, table, task
from tasks.stages.change_target import shown_by
from tasks.stages.throttle import throttled


@task
def select_text(settings: Select, seed: int, target: Artifact, text: Artifact) -> Artifact:
    """Keep the training documents that the recipe's method chooses; an artifact of kind "text"."""
    device = load_settings().device

    def make(directory: Path, work: Path) -> None:
        target_dir, text_dir = open_artifact(target), open_artifact(text)
        documents = read_documents(text_dir, "train")
        by_domain = tokenise(documents, target_dir)
        # In the order of `documents`, and no longer than what a step trains on.
        waiting = {domain: iter(of_domain) for domain, of_domain in by_domain.items()}
        pool = [next(waiting[document.domain])[: settings.max_length] for document in documents]
        proxy_dir = _proxy_dir(settings, target_dir, work)
        with progress("select text") as show:

            def train(chosen: list[int]) -> PreTrainedModel:
                proxy, learnt = load_model(proxy_dir, device=device), [pool[place] for place in chosen]
                on_progress = shown_by(show, f"proxy on {len(chosen)} documents, ")
                round_dir = work / f"round-{len(chosen)}"
                training.train(proxy, learnt, settings.training, (), seed, round_dir, on_progress)
                return proxy

            def accepted(chosen: list[int]) -> Tensor:
                draft = lm.Lm(train(chosen) if chosen else load_model(proxy_dir, device=device))
                return select.acceptance(draft, target_dir, pool, 1, work / "states", device)

            sources = select.Sources(train, lambda: load_model(target_dir, device=device), accepted)
            rng = torch.Generator().manual_seed(seed)
            chosen = select.select(pool, settings.num_documents, settings.num_rounds, settings.method, sources, rng)
        write_documents(directory, "train", [documents[place] for place in chosen])
        write_documents(directory, "held_out", read_documents(text_dir, "held_out"))
        counts = {domain: sum(documents[place].domain == domain for place in chosen) for domain in by_domain}
        rows = [{"domain": name, "chosen": count, "of": len(by_domain[name])} for name, count in counts.items()]
        table("selected", rows, f"documents chosen by {settings.method.name}")

    params = {"settings": settings.model_dump(mode="json", exclude={"checkpoint_s"}), "seed": seed}
    return cached_step("select", "text", params, throttled(make), {"target": target, "text": text}, (tokenise,))


def _proxy_dir(settings: Select, target_dir: Path, work: Path) -> Path:
    """Return the proxy's directory, made in `work` if the recipe names one; ValueError if its tokenizer is another."""
    if settings.proxy is None:
        return target_dir
    directory = work / "proxy"
    directory.mkdir(exist_ok=True)
    catalog.load("targets", settings.proxy.name).build(settings.proxy, directory)
    if describe(directory).tokenizer_sha256 != describe(target_dir).tokenizer_sha256:
        raise ValueError("[select] proxy has another tokenizer than the target, so it can't read the same tokens")
    return directory
