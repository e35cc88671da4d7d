"""The table of verification rules: its figures keep to what is known of the rules."""

from pathlib import Path

import pytest

from models import catalog
from tasks.measure.comparisons import Bench, verify
from tests.tasks.measure.benches import random_texts


@pytest.fixture(scope="module")
def found(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Measure all rows of up to two drafts at one temperature."""
    texts = random_texts(6, 24)
    bench = Bench(tiny_target, texts, texts, 0.1, tmp_path_factory.mktemp("bench"))
    rows = [row for row in verify.rows(0.1) if row.settings["drafts"] < 4 and row.settings["temperature"] == 1]
    return {row.name: verify.measure(bench, row, seed=0) for row in rows}


def test_lossless_rules_lose_nothing_and_keep_no_more_than_can_be_kept(found: dict[str, dict[str, float]]) -> None:
    for name, figures in found.items():
        assert figures.keys() == verify.COLUMNS.keys()
        if catalog.load("verify", name.partition(",")[0]).LOSSLESS:
            assert figures["lost"] < 1e-6 and figures["short_pct"] > -1e-4, name
    assert found["typical, 2 drafts, T 1"]["lost"] > 0.01


def test_the_best_rule_is_never_short_and_rejection_is_where_it_has_siblings(
    found: dict[str, dict[str, float]],
) -> None:
    assert found["multi_draft_optimal, 2 drafts, T 1"]["short_pct"] == pytest.approx(0, abs=1e-4)
    assert found[verify.BASELINE]["short_pct"] == pytest.approx(0, abs=1e-4)
    best = found["multi_draft_optimal, 2 drafts, T 1"]
    rejection = found["rejection, 2 drafts, certain but one, T 1"]
    assert rejection["most_pct"] == pytest.approx(best["most_pct"]) and rejection["kept_pct"] < best["kept_pct"]


def test_more_drafts_keep_more(found: dict[str, dict[str, float]]) -> None:
    one = found[verify.BASELINE]["kept_pct"]
    assert found["rejection, 2 drafts, T 1"]["kept_pct"] > one
    assert found["without_replacement, 2 drafts, T 1"]["kept_pct"] > found["rejection, 2 drafts, T 1"]["kept_pct"]


def test_every_rule_that_samples_has_rows_but_the_one_for_image_tokens() -> None:
    sampling = {name for name in catalog.names("verify") if catalog.load("verify", name).SAMPLES}
    assert sampling - set(verify.RULES) == {"relaxed_nearest"}
