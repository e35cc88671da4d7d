"""Drafts from elsewhere, of any family that reads such: a nested one by itself, and what can't be taken."""

import re
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import numpy as np
import pytest
import torch

from infra.artifacts import Artifact, publish, staged
from models.core.checkpoints.loading import load_model
from models.core.drafting.draft_families import open_draft
from models.core.learning.answering import NO_STOPS, Ask, go_on
from models.core.learning.hidden import Sample
from models.drafts import eagle3, lm
from models.drafts.eagle3.layouts import TAPS
from models.recipe import load_recipe
from models.targets import random
from tasks.adopt_draft import adopt_draft, settle_reading
from tests.models.published import published
from tests.tasks.made import samples_files, target_files


@pytest.mark.slow
def test_a_nested_draft_is_taken_by_itself_and_remembered(home: Path, tmp_path: Path, tiny_draft: Path) -> None:
    with staged(tmp_path / "target") as directory:
        random.build(random.Params(num_layers=3), directory)
    target, source = publish(tmp_path / "target", "target"), tmp_path / "source"
    source.mkdir()
    lm.save(lm.create(lm.Params(num_layers=2, nested=(1,)), target.path, None), source)
    whole, alone = adopt_draft.fn(target, source), adopt_draft.fn(target, source, 1)
    assert (whole.source_layers, alone.source_layers) == (None, 1)
    assert whole.source_sha256 == alone.source_sha256
    drafts = [open_draft(one.draft.path, target.path) for one in (whole, alone)]
    assert [len(one.model.layers) for one in drafts if isinstance(one, lm.Lm)] == [2, 1]
    with pytest.raises(ValueError, match="first 2 layers of this draft were not trained as one"):
        adopt_draft.fn(target, source, 2)
    copytree(tiny_draft, tmp_path / "head", ignore=ignore_patterns("manifest.json"))
    with pytest.raises(ValueError, match="--layers is for drafts in which others are nested, and those of eagle3 have"):
        adopt_draft.fn(target, tmp_path / "head", 1)


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize(("said", "told"), [(512, 512), (2048, None), (4096, None), (None, None)])
def test_it_is_told_of_a_head_that_was_made_for_shorter_texts_than_the_target_reads(
    home: Path, tiny_target: Path, tiny_draft: Path, tmp_path: Path, layout: str, said: int | None, told: int | None
) -> None:
    def say(config: dict[str, Any], tensors: object) -> None:
        layer = config.get("transformer_layer_config", config)
        del layer["max_position_embeddings"]
        layer.update({} if said is None else {"max_position_embeddings": said})

    source = published(tiny_draft, tiny_target, tmp_path / "source", layout, say)
    assert adopt_draft.fn(target_files(tiny_target, tmp_path / "target"), source).trained_context == told


def answers_of(target: Path, folder: Path) -> Artifact:
    """Return what a target says greedily to seeded prompts, as samples that were held out."""
    prompts = torch.randint(3, 259, (24, 8), generator=torch.Generator().manual_seed(0))
    model, asks = load_model(target, torch.float32, "cpu"), [Ask(prompt, 24) for prompt in prompts.tolist()]
    said = go_on(model, asks, NO_STOPS, torch.Generator())
    samples = [Sample(f"s{n}", "chat", prompts[n].tolist(), answer) for n, answer in enumerate(said)]
    return samples_files(folder, [], held_out=samples)


@pytest.mark.slow
@pytest.mark.parametrize(("named", "right"), [(False, (2, 5, 8)), (True, (1, 4, 7))])
def test_what_a_heads_files_leave_open_is_measured_on_the_targets_own_answers(
    named: bool, right: tuple[int, ...], home: Path, tmp_path: Path
) -> None:
    with staged(tmp_path / "target") as directory:
        random.build(random.Params(num_layers=8), directory)
    target = publish(tmp_path / "target", "target")
    ours = tmp_path / "ours"
    ours.mkdir()
    head = eagle3.create(eagle3.Params(vocab_size=258, aux_layers=right), target.path, np.ones(259))
    eagle3.save(head, ours)

    def leave_open(config: dict[str, Any], tensors: object) -> None:
        del config[TAPS]
        if named:  # as what is trained for SGLang names them: by the layers whose output is read
            config["eagle_config"] = {TAPS: [tap - 1 for tap in right]}

    source = published(ours, target.path, tmp_path / "source", "native", leave_open)
    adopted = adopt_draft.fn(target, source)
    assert open_draft(adopted.draft.path, target.path).taps != right  # as vLLM would read it
    samples = answers_of(target.path, tmp_path / "samples")
    settled = settle_reading.fn(load_recipe("tiny"), target, adopted, samples)
    assert open_draft(settled.draft.path, target.path).taps == right
    assert settled.source_reading.startswith(f"layers {', '.join(map(str, right))}: τ ")
    best, *others = (float(found) for found in re.findall(r"\d\.\d\d", settled.source_reading))
    print(f"\n{settled.source_reading}")
    assert best > max(others) + 0.05
    assert len(others) == (1 if named else 3)
    assert settle_reading.fn(load_recipe("tiny"), target, adopted, samples) == settled
    named_head = adopt_draft.fn(target, published(ours, target.path, tmp_path / "named", "native"))
    assert settle_reading.fn(load_recipe("tiny"), target, named_head, samples) is named_head
