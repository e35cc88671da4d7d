"""The table of sensitivity: its parts are all of the model, and excepting all layers leaves no static one."""

from pathlib import Path

import pytest

from models import together
from models.core.checkpoints import mixed
from models.quantize import int8_static
from tasks.measure.comparisons import Bench, sensitivity
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LAYERS = [*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP)]


def test_parts_add_up_to_all_layers_and_exceptions_take_their_own(tiny_target: Path, tmp_path: Path) -> None:
    texts = random_texts(12, 40)
    bench = Bench(tiny_target, texts, texts, 0.05, tmp_path)
    found = {row.name: sensitivity.measure(bench, row, seed=0) for row in sensitivity.rows(0.05)}
    assert all(figures.keys() == sensitivity.COLUMNS.keys() for figures in found.values())
    layers = {name: figures["layers"] for name, figures in found.items()}
    assert layers[sensitivity.BASELINE] == 14 and layers["all dynamic"] == 0
    assert sum(layers[f"only {kind}"] for kind in sensitivity.KINDS) == 14
    assert sum(layers[f"only quarter {part}"] for part in (1, 2, 3, 4)) == 14
    assert layers["down dynamic"] == layers["down in floats"] == 12
    for kind, size in sensitivity.SIZES.items():
        assert layers[f"{size} of 7 by lot, dynamic"] == layers[f"{kind} dynamic"] == 14 - 2 * size
    assert found["all dynamic"]["kl"] < found[sensitivity.BASELINE]["kl"]
    assert found["down in floats"]["size_mib"] > found["down dynamic"]["size_mib"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_exceptions_by_lot_fit_exactly_as_many_layers_and_no_part_of_what_engines_multiply_as_one(size: int) -> None:
    layers = [f"model.layers.{number}.{name}" for number in range(30) for name in LAYERS]
    drawn = [sensitivity._by_lot(size * 30, 30, seed) for seed in range(20)]
    for patterns in drawn:
        exceptions = dict.fromkeys(patterns, together.FLOAT)
        assert len(mixed.chosen(layers, exceptions)) == size * 30
        together.require_exceptions(int8_static.Params(), exceptions)
    assert len({tuple(patterns) for patterns in drawn}) == 20
