from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.core.learning import binary_head


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 6.0])
@pytest.mark.parametrize("num_layers", [0, 2])
def test_where_features_are_alike_it_says_the_weighed_share(num_layers: int, weight: float) -> None:
    labels = torch.tensor([1.0, 1.0, 1.0, 0.0])
    head = binary_head.fit(torch.ones(4, 3), labels, num_layers, weight, seed=0)
    said = head(torch.ones(1, 3)).sigmoid()
    assert float(said) == pytest.approx(0.75 / (0.75 + weight * 0.25), abs=0.01)


def test_what_depends_on_a_feature_is_learnt_whatever_its_scale() -> None:
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(4000, 2, generator=rng) * torch.tensor([100.0, 1.0]) + 50
    truth = ((features[:, 0] - 50) / 50).sigmoid()
    labels = (torch.rand(4000, generator=rng) < truth).float()
    head = binary_head.fit(features, labels, 1, 1.0, seed=0)
    assert float((head(features).sigmoid() - truth).abs().mean()) < 0.05
    soft = binary_head.fit(features, truth, 1, 1.0, seed=0)
    assert float((soft(features).sigmoid() - truth).abs().mean()) < 0.02


def test_a_head_comes_back_from_its_file_and_the_seed_repeats_it(tmp_path: Path) -> None:
    features, labels = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 2
    one, again = (binary_head.fit(features, labels, 2, 6.0, seed=3) for _ in range(2))
    binary_head.save(one, tmp_path / "head.safetensors")
    loaded = binary_head.load(tmp_path / "head.safetensors", 3)
    assert torch.equal(one(features), again(features))
    assert torch.equal(one(features), loaded(features))


def test_what_is_no_head_or_no_example_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no file .*missing"):
        binary_head.load(tmp_path / "missing", 3)
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    with pytest.raises(ValueError, match="holds no head, but tensors a"):
        binary_head.load(tmp_path / "other", 3)
    binary_head.save(binary_head.BinaryHead(4, 0), tmp_path / "four")
    with pytest.raises(ValueError, match="reads 4 features; wanted one for 3"):
        binary_head.load(tmp_path / "four", 3)
    with pytest.raises(ValueError, match=r"wanted features \[N, F\] and labels \[N\]; got \[0, 3\]"):
        binary_head.fit(torch.empty(0, 3), torch.empty(0), 0, 1.0, seed=0)
    with pytest.raises(ValueError, match="labels must be from 0 to 1, got 0 to 2"):
        binary_head.fit(torch.zeros(2, 3), torch.tensor([0, 2]), 0, 1.0, seed=0)
