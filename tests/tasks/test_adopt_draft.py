"""Drafts from elsewhere, of any family that reads such: a nested one by itself, and what can't be taken."""

from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from infra.artifacts import publish, staged
from models.drafting.draft_families import open_draft
from models.drafts import lm
from models.targets import random
from tasks.adopt_draft import adopt_draft


@pytest.mark.slow
def test_a_nested_draft_is_taken_by_itself_and_remembered(
    tmp_path: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    with staged(tmp_path / "target") as directory:
        random.build(random.Params(num_layers=3), directory)
    target, source = publish(tmp_path / "target", "target"), tmp_path / "source"
    source.mkdir()
    lm.save(lm.create(lm.Params(num_layers=2, nested=(1,)), target.path, None), source)
    whole, alone = adopt_draft.fn(target, source), adopt_draft.fn(target, source, 1)
    assert (whole.num_layers, alone.num_layers) == (None, 1)
    assert whole.source_sha256 == alone.source_sha256
    drafts = [open_draft(one.draft.path, target.path) for one in (whole, alone)]
    assert [len(one.model.layers) for one in drafts if isinstance(one, lm.Lm)] == [2, 1]
    with pytest.raises(ValueError, match="first 2 layers of this draft were not trained as one"):
        adopt_draft.fn(target, source, 2)
    copytree(tiny_draft, tmp_path / "head", ignore=ignore_patterns("manifest.json"))
    with pytest.raises(ValueError, match="--layers is for drafts in which others are nested, and those of eagle3 have"):
        adopt_draft.fn(target, tmp_path / "head", 1)
