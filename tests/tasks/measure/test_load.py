"""The draft that knows nothing: another one's shape, none of its weights, a promise that a service can hold it to."""

import pytest
import torch
from safetensors.torch import load_file

from infra.artifacts import check_manifest, write_manifest
from models.core.drafting.draft_families import check_draft
from models.drafts import ngram
from models.targets import describe
from tasks.measure.load import register_random
from tests.tags import draft_tags


def test_a_random_draft_fits_where_the_other_serves_and_none_of_its_weights_is_left(
    registry, tiny_target, tiny_draft, tmp_path
):
    registry.register("draft", tiny_draft, draft_tags(golden_tau="1.8"))
    number = register_random(registry, 1, tiny_target, tmp_path / "random", seed=0)
    version = registry.get("draft", number)
    assert (number, version.lineage.parent, version.lineage.golden_tau) == (2, 1, 1.0)
    files = registry.download(version, tmp_path / "cache")
    check_manifest(files)
    check_draft(files, tiny_draft, describe(tiny_target))
    before, after = (load_file(directory / "model.safetensors") for directory in (tiny_draft, files))
    for name, weight in before.items():
        if weight.dtype.is_floating_point and weight.numel() > 1000:
            assert not torch.equal(weight, after[name])
            assert after[name].float().std() == pytest.approx(float(weight.float().std()), rel=0.1)
        elif not weight.dtype.is_floating_point:  # which tokens it can draft is a shape, too
            assert torch.equal(weight, after[name])


def test_a_draft_without_weights_has_no_random_one(registry, tiny_target, tmp_path):
    directory = tmp_path / "ngram"
    directory.mkdir()
    ngram.save(ngram.create(ngram.Params(), tiny_target, None), directory)
    write_manifest(directory)
    registry.register("draft", directory, draft_tags())
    with pytest.raises(ValueError, match="family ngram has no weights"):
        register_random(registry, 1, tiny_target, tmp_path / "random", seed=0)
