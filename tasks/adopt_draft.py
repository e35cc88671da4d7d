"""Take a draft that was trained elsewhere, in any layout that its family reads, and save it as those made here are."""

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from infra.artifacts import Artifact, open_artifact
from infra.manifest import canonical_json, file_sha256
from infra.settings import load_settings
from models.core.drafting.draft_families import adopter_of, name_of, open_draft
from models.core.evaluation.scoring import score
from models.recipe import Recipe
from models.types import Frozen
from tasks.measure_draft import tau_of
from tasks.stages import cached_step
from tasks.stages.reporting import table
from tasks.stages.samples import read_samples
from tasks.stages.task import task
from tasks.stages.throttle import throttled

NUM_SCORED = 32
TAUS = "taus.json"
READ = ("config.json", "tokenizer.json", "*.safetensors")


class Adopted(Frozen):
    """A draft from elsewhere: as it is served, and where it came from.

    Attributes:
        draft: kind "draft", as the engine loads it.
        source: the directory that was read.
        source_sha256: of the files in it that count.
        num_layers: how many of its first layers were taken, None for all that it is.
        reading: what was measured to be right where its files leave something open, "" where they don't.
    """

    draft: Artifact
    source: str
    source_sha256: str
    num_layers: int | None = None
    reading: str = ""


@task
def adopt_draft(target: Artifact, source: Path, num_layers: int | None = None) -> Adopted:
    """Check a published draft against the target and convert it; its layout says which family reads it.

    Of a draft in which others are nested, `num_layers` takes that of so many first layers.

    Raises:
        ValueError: no family reads its layout, it does not fit, or no such draft is nested in it; names what is wrong.
    """
    family = adopter_of(source)
    if num_layers is not None and not hasattr(family, "cut"):
        raise ValueError(f"--layers is for drafts in which others are nested, and those of {name_of(family)} have none")
    sha256 = _digest(source)

    def make(directory: Path, _: Path) -> None:
        draft = family.adopt(source, open_artifact(target))
        family.save(draft if num_layers is None else cast("Any", family).cut(draft, num_layers), directory)

    draft = cached_step(
        stage="adopted",
        kind="draft",
        params={"source_sha256": sha256, **({} if num_layers is None else {"num_layers": num_layers})},
        inputs={"target": target},
        code=(make, family),
        make=make,
    )
    return Adopted(draft=draft, source=str(source), source_sha256=sha256, num_layers=num_layers)


@task
def settle_reading(recipe: Recipe, target: Artifact, adopted: Adopted, samples: Artifact) -> Adopted:
    """Take the reading of a published draft that scores best on held-out samples, where its files leave it open."""
    source, target_dir, num = Path(adopted.source), open_artifact(target), recipe.num_draft_tokens
    family = adopter_of(source)
    code = (_digest, family, score)
    params = {"num_draft_tokens": num, "rules": [rule.model_dump() for rule in recipe.engine.rules]}
    opened = family.readings(open_draft(open_artifact(adopted.draft), target_dir), source, target_dir)
    if len(opened) == 1:
        return adopted

    def measure(directory: Path, work: Path) -> None:
        held_out = read_samples(samples, "held_out")
        chosen = held_out[:: max(1, len(held_out) // NUM_SCORED)][:NUM_SCORED]
        taus = {}
        for name, draft in opened.items():
            scores = score(draft, target_dir, chosen, num, work, load_settings().device, recipe.engine.rules)
            taus[name] = tau_of(scores)
        (directory / TAUS).write_text(json.dumps(taus))

    inputs = {"target": target, "samples": samples, "draft": adopted.draft}
    measured = cached_step(
        stage="readings", kind="scores", params=params, inputs=inputs, code=code, make=throttled(measure)
    )
    taus: dict[str, float] = json.loads((open_artifact(measured) / TAUS).read_text())
    best = max(taus, key=lambda name: taus[name])
    rows = [{"reading": name, "τ": round(tau, 3), "taken": name == best} for name, tau in taus.items()]
    table("readings", rows, f"the draft's files leave open what it reads; taken: {best}")
    draft = cached_step(
        stage="adopted",
        kind="draft",
        params={"reading": best},
        inputs=inputs,
        code=code,
        make=lambda directory, _: family.save(opened[best], directory),
    )
    others = ", ".join(f"{name} {tau:.2f}" for name, tau in taus.items() if name != best)
    told = f"{best}: τ {taus[best]:.2f} on {NUM_SCORED} answers of the target at most; {others}"
    return adopted.model_copy(update={"draft": draft, "reading": told})


def _digest(directory: Path) -> str:
    """Hash the files that an import reads; hub caches hold links to them, which a manifest refuses."""
    files = sorted(file for pattern in READ for file in directory.glob(pattern))
    return hashlib.sha256(canonical_json({file.name: file_sha256(file) for file in files})).hexdigest()
