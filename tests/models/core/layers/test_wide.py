"""A pass spread over sequences or groups of layers says what the plain pass says."""

from pathlib import Path

import pytest
import torch

from models.core.layers.decoder import Cache
from models.core.layers.wide import WideDecoder

TEXTS = ([7, 11, 13, 17, 4], [5, 9], [30, 31, 32])


@pytest.fixture(scope="module")
def decoder(deep_target: Path) -> WideDecoder:
    return WideDecoder.load(deep_target, torch.float32)


def read(decoder: WideDecoder, text: list[int]) -> tuple[Cache, torch.Tensor]:
    cache = Cache(decoder, len(text) + 4)
    return cache, decoder.forward(torch.tensor(text), cache)[0]


def test_sequences_of_different_lengths_step_together_as_each_alone(decoder: WideDecoder) -> None:
    caches = [read(decoder, text[:-1])[0] for text in TEXTS]
    states = decoder.together(torch.tensor([text[-1] for text in TEXTS]), caches)
    for text, cache, state in zip(TEXTS, caches, states, strict=True):
        alone, whole = read(decoder, list(text))
        torch.testing.assert_close(state, whole[-1], rtol=1e-4, atol=1e-5)
        assert cache.length == len(text)
        torch.testing.assert_close(cache.keys[:, :, : len(text)], alone.keys[:, :, : len(text)], rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_left_out_writes_no_keys(decoder: WideDecoder) -> None:
    cache, _ = read(decoder, TEXTS[0])
    decoder.together(torch.tensor([3]), [cache], layers={0, 3})
    place = len(TEXTS[0])
    assert [bool(cache.keys[layer, :, place].any()) for layer in range(4)] == [True, False, False, True]


def test_a_group_of_one_layer_is_the_plain_pass_and_a_larger_one_is_not(decoder: WideDecoder) -> None:
    cache, whole = read(decoder, TEXTS[0])
    for size, same in ((1, True), (2, False), (4, False)):
        other = Cache(decoder, len(TEXTS[0]))
        states = decoder.grouped(torch.tensor(TEXTS[0]), other, size)
        assert torch.allclose(states, whole, rtol=1e-4, atol=1e-5) is same
        # What the first layer of all reads is the embedding in any case.
        torch.testing.assert_close(other.keys[0], cache.keys[0, :, : len(TEXTS[0])])
        assert other.length == cache.length


def test_what_does_not_fit_is_refused(decoder: WideDecoder) -> None:
    cache, _ = read(decoder, TEXTS[0])
    with pytest.raises(ValueError, match="want as many caches, each its own; got 1"):
        decoder.together(torch.tensor([3, 4]), [cache])
    with pytest.raises(ValueError, match="each its own"):
        decoder.together(torch.tensor([3, 4]), [cache, cache])
    with pytest.raises(ValueError, match="is full"):
        decoder.together(torch.tensor([3]), [Cache(decoder, 0)])
    with pytest.raises(ValueError, match="1 or more, got 0"):
        decoder.grouped(torch.tensor([3]), cache, 0)
