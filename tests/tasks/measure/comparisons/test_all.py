from pathlib import Path

import pytest

from models import catalog
from models.core.checkpoints import compressed
from tasks.measure.comparisons import Bench
from tasks.measure.comparisons import all as comparison
from tests.tasks.measure.benches import random_texts

ROWS = {row.name: row for row in comparison.rows(0.1)}


def test_every_form_that_a_cpu_engine_reads_has_a_row() -> None:
    stored = {name: catalog.load("quantize", name).STORED for name in catalog.names("quantize")}
    forms = {form for form in stored.values() if form not in (None, compressed.FLOAT)}
    methods = [table["quantize"]["method"]["name"] for table in comparison.FORMS.values() if "quantize" in table]
    assert {stored[name] for name in methods} == forms
    assert {comparison.BASELINE, *comparison.FORMS} == ROWS.keys()


def test_every_word_that_can_be_asked_for_bounds_a_column() -> None:
    assert {metric for metric, _ in comparison.BOUNDS.values()} < comparison.COLUMNS.keys()
    assert {comparison.WINS_BY, *comparison.DRAWN} <= comparison.COLUMNS.keys()


@pytest.mark.engine
def test_a_quantized_row_is_answered_by_the_engine_from_a_smaller_file(tiny_target: Path, tmp_path: Path) -> None:
    texts = random_texts(16, 100, end=256)
    bench = Bench(tiny_target, texts, texts, 0.1, tmp_path)
    figures = comparison.measure(bench, ROWS["int8_static, down_proj dynamic"], seed=0)
    assert figures.keys() == comparison.COLUMNS.keys()
    assert figures["one_stream"] > 0 and figures["eight_streams"] > 0 and figures["kl"] > 0
    assert figures["checkpoint_mib"] < (tiny_target / "model.safetensors").stat().st_size / 2**20
    assert figures["peak_mib"] > 100  # an engine's process, torch and all
