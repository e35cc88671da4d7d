"""The comparison of quantization: its rows run, planted outliers change nothing, and LLM.int8()'s order comes out."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import catalog
from tasks.measure.comparisons import Bench
from tasks.measure.comparisons import quantize as comparison
from tests.tasks.measure.benches import random_texts

pytestmark = pytest.mark.slow

IDS = torch.randint(3, 259, (4, 48), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name",
    [
        *("float", "int8_dynamic", "qat", "kv_cache", "2:4, then rtn", "int8_static, down_proj dynamic"),
        *("awq, half of the text", "finetuned, then rtn", "outliers, absmax", "scratch, bitnet"),
    ],
)
def test_a_row_is_measured(name: str, tiny_target: Path, tmp_path: Path) -> None:
    row = next(row for row in comparison.rows(0.1) if row.name == name)
    texts = random_texts(30, 80)
    found = comparison.measure(Bench(tiny_target, texts, texts, 0.1, tmp_path), row, seed=0)
    assert found.keys() == comparison.COLUMNS.keys()
    alike = {metric: found.pop(metric) for metric in ("kl", "agreement_pct", "tau")}
    assert math.isnan(found.pop("rate")) == (name not in ("qat", "finetuned, then rtn", "scratch, bitnet"))
    # Of 1,024 tokens, four times the widest layer's inputs, a tenth, and never less than one block.
    tokens = found.pop("calibrated_tokens")
    assert tokens == 128 if any(word in name for word in ("2:4", "text", "static", "outliers")) else math.isnan(tokens)
    assert math.isnan(promised := found.pop("promised")) or (promised, name) == (14, "2:4, then rtn")
    assert all(value > 0 for value in found.values())
    assert math.isnan(alike["kl"]) == name.startswith("scratch") and math.isnan(alike["tau"])


def test_all_rows_of_four_bits_share_a_grid() -> None:
    rows = {row.name: row.settings.get("method", {}) for row in comparison.rows(1.0)}
    for name in ("rtn", "gptq", "awq", "qat", "2:4, then gptq"):
        assert comparison.GRID.items() <= rows[name].items(), name


def test_planted_outliers_change_nothing_in_floats(tiny_target: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    before = model(IDS).logits
    caught = []
    model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
    comparison.plant(model, torch.Generator().manual_seed(0))
    assert torch.allclose(model(IDS).logits, before, atol=2e-4)
    assert int((caught[0].abs().amax((0, 1)) > 60).sum()) == comparison.OUTLIERS


def test_decomposition_and_finer_scales_help_where_outliers_are_planted(tiny_target: Path, tmp_path: Path) -> None:
    def error(heading: str) -> float:
        settings = {"name": "llm_int8", **comparison.TABLE_1[heading]}
        model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
        comparison.plant(model, torch.Generator().manual_seed(0))
        with torch.no_grad():
            exact = model(IDS).logits
            params = catalog.parse("quantize", settings)
            quantized = catalog.load("quantize", params.name).quantize(model, IDS.tolist(), params)
            return float((quantized.model(IDS).logits - exact).norm() / exact.norm())

    decomposed, vector = error("absmax vector-wise + decomposition"), error("absmax vector-wise")
    assert decomposed < 0.3 * vector
    assert vector < 1.1 * error("absmax")
