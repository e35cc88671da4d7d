"""A draft that knows nothing: what the worst refresh could serve."""

import shutil
from pathlib import Path

import torch

from infra.manifest import write_manifest
from infra.registry import Registry
from models.drafting.draft_families import family_of, name_of


def register_random(registry: Registry, number: int, target_dir: Path, folder: Path, seed: int) -> int:
    """Register a draft of another one's shape, with noise of the same mean and spread for each weight.

    Args:
        registry: a benchmark's own.
        number: of the draft whose shape it has.
        target_dir: what they draft for.
        folder: where it is written first; what was there is lost.
        seed: of the noise.

    Returns:
        its number; its probe promises nothing, so that a service takes it, and its domains what they promised of the
        other, as where the traffic has changed.

    Raises:
        ValueError: drafts of the family have no weights.
    """
    version = registry.get("draft", number)
    files = registry.download(version, folder.with_name(f"{folder.name}-like"))
    family = family_of(files)
    if not family.TRAINED:
        raise ValueError(f"a draft of family {name_of(family)} has no weights, so there is no bad one")
    draft, rng = family.load(files, target_dir), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            spread = float(weight.std()) if weight.numel() > 1 else 0.0
            weight.copy_(weight.mean() + spread * torch.randn(weight.shape, generator=rng))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    family.save(draft, folder)
    write_manifest(folder)
    lineage = version.lineage.model_copy(update={"parent": number, "probe_tau": 1.0})
    return registry.register("draft", folder, lineage.to_tags()).number
