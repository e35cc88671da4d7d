"""Take a draft that was trained elsewhere, in any layout that its family reads, and save it as those made here are."""

import json
from pathlib import Path
from typing import Any, cast

from infra.artifacts import Artifact, file_sha256, open_artifact
from infra.settings import load_settings
from models.core.drafting.draft_families import adopter_of, name_of, open_draft, read_json
from models.core.evaluation.scoring import score
from models.recipe import Recipe
from tasks.measure_draft import scored_by, tau_of
from tasks.register import Adopted
from tasks.stages import cached_step, json_sha256, table, task
from tasks.stages.samples import read_samples
from tasks.stages.throttle import throttled

NUM_SCORED = 32
TAUS = "taus.json"
READ = ("config.json", "tokenizer.json", "*.safetensors")


@task
def adopt_draft(target: Artifact, source: Path, num_layers: int | None = None) -> Adopted:
    """Check a published draft against the target and convert it; its layout says which family reads it.

    Of a draft in which others are nested, `num_layers` takes that of so many first layers. ValueError names what is
    wrong: no family reads its layout, it does not fit, or no such draft is nested in it.
    """
    family = adopter_of(source)
    if num_layers is not None and not hasattr(family, "cut"):
        raise ValueError(f"--layers is for drafts in which others are nested, and those of {name_of(family)} have none")
    # The files that an import reads: hub caches hold links to them, which a manifest refuses.
    read = sorted(file for pattern in READ for file in source.glob(pattern))
    sha256 = json_sha256({file.name: file_sha256(file) for file in read})

    def make(directory: Path, _: Path) -> None:
        draft = family.adopt(source, open_artifact(target))
        family.save(draft if num_layers is None else cast("Any", family).cut(draft, num_layers), directory)

    params = {"source_sha256": sha256} | ({} if num_layers is None else {"num_layers": num_layers})
    draft = cached_step("adopted", "draft", params, make, {"target": target}, (family,))
    context, served = family.context(source), read_json(target.path / "config.json").get("max_position_embeddings")
    return Adopted(
        draft=draft,
        source=str(source),
        source_sha256=sha256,
        source_layers=num_layers,
        trained_context=context if context and served and context < served else None,
    )


@task
def settle_reading(recipe: Recipe, target: Artifact, adopted: Adopted, samples: Artifact) -> Adopted:
    """Take the reading of a published draft that scores best on held-out samples, where its files leave it open."""
    source, target_dir = Path(adopted.source), open_artifact(target)
    family = adopter_of(source)
    opened = family.readings(open_draft(open_artifact(adopted.draft), target_dir), source, target_dir)
    if len(opened) == 1:
        return adopted

    def measure(directory: Path, work: Path) -> None:
        held_out = read_samples(samples, "held_out")
        chosen = held_out[:: max(1, len(held_out) // NUM_SCORED)][:NUM_SCORED]
        num, device, rules = recipe.num_draft_tokens, load_settings().device, recipe.engine.rules
        scored = {one: score(draft, target_dir, chosen, num, work, device, rules) for one, draft in opened.items()}
        (directory / TAUS).write_text(json.dumps({name: tau_of(scores) for name, scores in scored.items()}))

    inputs, code = {"target": target, "samples": samples, "draft": adopted.draft}, (family, score)
    measured = cached_step("readings", "scores", scored_by(recipe), throttled(measure), inputs, code)
    taus: dict[str, float] = json.loads((open_artifact(measured) / TAUS).read_text())
    best = max(taus, key=lambda name: taus[name])
    rows = [{"reading": name, "τ": round(tau, 3), "taken": name == best} for name, tau in taus.items()]
    table("readings", rows, f"the draft's files leave open what it reads; taken: {best}")
    others = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items() if name != best)

    def save(directory: Path, _: Path) -> None:
        family.save(opened[best], directory)

    draft = cached_step("adopted", "draft", {"reading": best}, save, inputs, code)
    told = f"{best}: τ {taus[best]:.2f} on {NUM_SCORED} answers of the target at most; {others}"
    return adopted.model_copy(update={"draft": draft, "source_reading": told})
