"""The best place and length follow from times that are reckoned by hand."""

import math
from pathlib import Path

import pytest
import torch

from models.layers.wide import WideDecoder
from models.systems import Given, dovetail
from models.throughput.cost import Cost
from tests.models.systems import planted

PARTS = {1: 5.0}


def test_a_draft_that_costs_nothing_is_deep_and_long_where_rows_are_free() -> None:
    choice = dovetail.best(planted.times(PARTS, PARTS, 0.0, 0.0), 10, 1e9, 0.0)
    alpha = dovetail.acceptance(8)
    assert choice[1:] == (16, 8)
    assert choice.token_ms == pytest.approx(10 * (1 - alpha) / (1 - alpha**17))


def test_fewer_tokens_are_drafted_where_rows_cost() -> None:
    lengths = [
        dovetail.best(planted.times(PARTS, PARTS, 0.0, 0.0, row_ms), 10, 9.0, 0.05).num_drafted
        for row_ms in (0.0, 1.0, 3.0, 20.0)
    ]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[2] and lengths[-1] == 0


def test_a_deeper_draft_pays_on_the_faster_machine() -> None:
    times = planted.times(PARTS, PARTS, 1.0, 0.0, row_ms=0.5)
    cpu, gpu = dovetail.best(times, 10, 1.0, 0.0), dovetail.best(times, 10, 9.0, 0.05)
    assert gpu.depth > cpu.depth and gpu.token_ms < cpu.token_ms


def test_a_crossing_that_takes_longer_than_the_target_ends_speculation() -> None:
    choice = dovetail.best(planted.times(PARTS, PARTS, 0.0, 0.0), 10, 9.0, 100.0)
    assert choice == (10.0, 0, 0)


def test_a_study_counts_and_puts_nothing_out(tiny_target: Path) -> None:
    decoder = WideDecoder.load(tiny_target, torch.float32)
    seen = dovetail.study(Given(decoder, [], 1, planted.times(PARTS, PARTS, 1.0, 0.0, 0.5)), torch.Generator())
    assert seen.gain > 1 and math.isnan(seen.kept) and seen.holds
    # With rows as dear as whole passes nothing is gained, and the claim isn't seen.
    dear = dovetail.study(Given(decoder, [], 1, planted.times(PARTS, PARTS, 1.0, 0.0, 30.0)), torch.Generator())
    assert dear.gain == 1 and not dear.holds


def test_what_tells_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted times of passes"):
        dovetail.best(planted.EASY._replace(cost=Cost()), 10, 9.0, 0.0)
    with pytest.raises(ValueError, match="faster must be above 0"):
        dovetail.best(planted.EASY, 10, 0.0, 0.0)
