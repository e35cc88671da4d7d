"""The table of sensitivity: its parts are all of the model, and excepting all layers leaves no static one."""

from pathlib import Path

import pytest
import torch

from tasks.measure.comparisons import Bench, sensitivity

pytestmark = pytest.mark.slow


def test_parts_add_up_to_all_layers_and_exceptions_take_their_own(tiny_target: Path, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    texts = {"chat": torch.randint(3, 259, (12, 40), generator=rng).tolist()}
    bench = Bench(tiny_target, texts, texts, 0.05, tmp_path)
    found = {row.name: sensitivity.measure(bench, row, seed=0) for row in sensitivity.rows(0.05)}
    assert all(figures.keys() == sensitivity.COLUMNS.keys() for figures in found.values())
    layers = {name: figures["layers"] for name, figures in found.items()}
    assert layers[sensitivity.BASELINE] == 14 and layers["all dynamic"] == 0
    assert sum(layers[f"only {kind}"] for kind in sensitivity.KINDS) == 14
    assert sum(layers[f"only quarter {part}"] for part in (1, 2, 3, 4)) == 14
    assert layers["down dynamic"] == layers["down in floats"] == 12
    assert found["all dynamic"]["kl"] < found[sensitivity.BASELINE]["kl"]
    assert found["down in floats"]["size_mib"] > found["down dynamic"]["size_mib"]
