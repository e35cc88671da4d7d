from itertools import pairwise
from pathlib import Path

import pytest
import torch

from models.core.layers.decoder import WideDecoder
from models.systems import Given, skipdecode
from tests.models.systems import planted

PROMPTS = [[7, 11, 13], [5, 9, 30, 31]]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> WideDecoder:
    return planted.eight_layers(tmp_path_factory.mktemp("target"))


def test_a_schedule_is_known_by_hand() -> None:
    assert skipdecode.schedule(8, 3, 0.75, 0.25, 1) == [(0, 3, 4, 5, 6, 7), (0, 5, 6, 7), (0, 7)]
    assert skipdecode.schedule(4, 2, 1.0, 1.0, 1) == [(0, 1, 2, 3)] * 2


@pytest.mark.parametrize(("num_layers", "num_tokens", "num_warm"), [(1, 2, 0), (2, 1, 1), (7, 40, 0), (30, 40, 1)])
def test_a_layer_runs_for_a_beginning_of_the_text_alone(num_layers: int, num_tokens: int, num_warm: int) -> None:
    layers = skipdecode.schedule(num_layers, num_tokens, 0.9, 0.1, num_warm)
    assert len(layers) == num_tokens
    for before, after in pairwise(layers):
        assert {*after} <= {*before}
    assert all(len(set(one)) == len(one) and num_layers - 1 in one for one in layers)


def test_all_layers_are_the_plain_way(decoder: WideDecoder) -> None:
    layers = [tuple(range(8))] * 6
    together, _ = skipdecode.answer(decoder, PROMPTS, layers)
    alone = [skipdecode.answer(decoder, [prompt], layers)[0][0] for prompt in PROMPTS]
    assert together == alone
    again, _ = skipdecode.answer(decoder, PROMPTS, layers, together)
    assert again == together


def test_a_model_whose_lower_layers_do_nothing_loses_nothing(tmp_path: Path) -> None:
    idle = planted.eight_layers(tmp_path, range(1, 6), ["self_attn.o_proj", "mlp.down_proj"])
    layers = skipdecode.schedule(8, 10, 0.75, 0.375, 1)
    assert min(map(len, layers)) == 3
    whole, _ = skipdecode.answer(idle, PROMPTS, [tuple(range(8))] * 10)
    assert skipdecode.answer(idle, PROMPTS, layers)[0] == whole


def test_a_study_of_an_untrained_model_keeps_little(decoder: WideDecoder) -> None:
    seen = skipdecode.study(Given(decoder, PROMPTS, 12, planted.EASY), torch.Generator())
    assert seen.gain > 0 and seen.kept < 0.95 and not seen.holds
