from pathlib import Path

import pytest
import torch

from models import catalog, compressed
from tasks.measure.comparisons import Bench, served

ROWS = {row.name: row for row in served.rows(1)}


def test_every_form_that_a_cpu_engine_reads_has_a_row() -> None:
    stored = {name: catalog.load("quantize", name).STORED for name in catalog.names("quantize")}
    forms = {form for form in stored.values() if form not in (None, compressed.FLOAT)}
    assert {stored[name] for name in served.QUANTIZED} == forms
    assert {served.BASELINE, *served.QUANTIZED, *served.SHRUNK} == ROWS.keys()


@pytest.mark.engine
def test_a_quantized_row_is_answered_by_the_engine_from_a_smaller_file(tiny_target: Path, tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(0)
    texts = {"chat": torch.randint(3, 256, (16, 100), generator=rng).tolist()}
    figures = served.measure(Bench(tiny_target, texts, texts, 0.1, tmp_path), ROWS["int8_dynamic"], seed=0)
    assert figures.keys() == served.COLUMNS.keys()
    assert figures["one_stream"] > 0 and figures["eight_streams"] > 0
    assert figures["checkpoint_mib"] < (tiny_target / "model.safetensors").stat().st_size / 2**20
