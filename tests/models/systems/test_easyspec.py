from pathlib import Path

import pytest
import torch

from models.core.layers.decoder import WideDecoder
from models.systems import Given, easyspec
from tests.models.systems import planted

PROMPTS = [[7, 11, 13, 2], [5, 9, 30]]
FLAT = dict.fromkeys((1, 2, 3, 4), 8.0)  # shared, it takes as long
HALVED = {size: 8.0 / size for size in (1, 2, 3, 4)}


def without_attention(directory: Path) -> WideDecoder:
    return planted.eight_layers(directory, range(8), ["self_attn.o_proj"])


def test_times_are_known_by_hand() -> None:
    times = planted.times(HALVED, HALVED, rest_ms=1.0, meet_ms=0.1)
    assert easyspec.shared_ms(times, 8, 1) == pytest.approx(17)  # 8 + 8 + 1, no meeting
    assert easyspec.shared_ms(times, 8, 4) == pytest.approx(6.6)  # 2 + 2 + 1 + 16 meetings
    assert easyspec.at_once_ms(times, 8, 4) == pytest.approx(6.0)  # 2 + 2 + 1 + 10 meetings
    # Five tokens of 6.6 against five of 6 and an exact pass of 6.6.
    assert easyspec.gain(times, 8, 4, 5) == pytest.approx(33 / 36.6)
    flat = planted.times(FLAT, HALVED, rest_ms=0.0, meet_ms=0.0)  # attentions that can't be shared
    assert easyspec.gain(flat, 8, 4, 5) == pytest.approx(5 * 10 / (5 * 4 + 10))
    assert easyspec.gain(planted.EASY, 8, 4, 4) == pytest.approx(4 / 5)  # sharing is free


def test_an_exact_draft_is_accepted_whole_and_a_fuzzy_one_is_not(tmp_path: Path) -> None:
    decoder = planted.eight_layers(tmp_path)
    assert easyspec.accepted(decoder, PROMPTS[0], 20, 1, 5) == 1
    assert easyspec.accepted(decoder, PROMPTS[0], 20, 8, 5) < 1


def test_attentions_that_add_nothing_leave_the_draft_exact(tmp_path: Path) -> None:
    assert easyspec.accepted(without_attention(tmp_path), PROMPTS[0], 20, 8, 5) == 1


def test_a_study_holds_both_halves_of_the_claim(tmp_path: Path) -> None:
    decoder, times = without_attention(tmp_path), planted.times(FLAT, HALVED, 0.0, 0.0)
    seen = easyspec.study(Given(decoder, PROMPTS, 10, times), torch.Generator())
    assert seen.gain > 1 and seen.kept == 1 and seen.holds
    slow = easyspec.study(Given(decoder, PROMPTS, 10, planted.EASY), torch.Generator())
    assert slow.gain < 1 and not slow.holds
