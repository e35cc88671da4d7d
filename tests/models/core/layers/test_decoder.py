from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from models.core.checkpoints.loading import read_tensors
from models.core.layers.decoder import CHUNK, Begun, Cache, Decoder, Sublayers, WideDecoder

SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "llama, bfloat16 values": (LlamaForCausalLM, LlamaConfig(**SHAPE, dtype="bfloat16")),
    "llama 3 rope, head of its own": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=32)),
}


Pair = tuple[torch.nn.Module, Decoder]
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=MODELS, scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, config = MODELS[request.param]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
            parameter.data = parameter.to(config.dtype or torch.float32).float()
    directory = tmp_path_factory.mktemp("model")
    model.save_pretrained(directory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")  # where bfloat16 is read as float16
        return model, Decoder.load(directory, torch.float32)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("count", "tolerance"), [(30, 1e-4), (CHUNK + 50, 1e-3)], ids=["at once", "in chunks"])
@torch.inference_mode()
def test_logits_and_tapped_states_are_the_librarys(pair: Pair, count: int, tolerance: float) -> None:
    model, decoder = pair
    wanted = model(tokens(count)[None], output_hidden_states=True)
    states, tapped = decoder.forward(tokens(count), Cache(decoder, count), taps=(0, 1, 2))
    assert_close(decoder.logits(states), wanted.logits[0], rtol=tolerance, atol=tolerance)
    wanted_taps = torch.cat(wanted.hidden_states[:3], -1)[0]
    assert_close(tapped, wanted_taps, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_steps_of_any_size_and_a_cut_give_what_one_pass_gives(pair: Pair) -> None:
    _, decoder = pair
    whole, _ = decoder.forward(tokens(40), Cache(decoder, 40))
    cache = Cache(decoder, 48)
    parts = [decoder.forward(part, cache)[0] for part in tokens(40).split([20, 1, 5, 14])]
    assert_close(torch.cat(parts), whole)
    cache.length = 20
    decoder.forward(torch.tensor([5, 6, 7, 8]), cache)
    cache.length = 20
    again, _ = decoder.forward(tokens(40)[20:], cache)
    assert_close(again, whole[20:])


PARENTS = (-1, 0, 0, 1, 1, 2, 5)


@torch.inference_mode()
def test_each_path_of_a_tree_is_read_as_a_text_of_its_own(pair: Pair) -> None:
    _, decoder = pair
    prompt, tree = tokens(12), tokens(19)[12:]
    cache = Cache(decoder, 24)
    decoder.forward(prompt, cache)
    states, tapped = decoder.forward(tree, cache, taps=(1, 3), parents=PARENTS)
    for path in ([0, 1, 3], [0, 1, 4], [0, 2, 5, 6]):
        text = torch.cat([prompt, tree[path]])
        wanted, wanted_tapped = decoder.forward(text, Cache(decoder, 24), taps=(1, 3))
        assert_close(states[path], wanted[12:])
        assert_close(tapped[path], wanted_tapped[12:])


@pytest.mark.parametrize("path", [[0], [0, 2, 5, 6]])
@torch.inference_mode()
def test_a_cache_that_keeps_a_path_is_that_of_a_fresh_pass(pair: Pair, path) -> None:
    _, decoder = pair
    cache, fresh, (before, tree, after) = Cache(decoder, 32), Cache(decoder, 32), tokens(24).split([12, 7, 5])
    decoder.forward(before, cache)
    decoder.forward(tree, cache, parents=PARENTS)
    cache.keep(12, path)
    decoder.forward(torch.cat([before, tree[path]]), fresh)
    assert cache.length == fresh.length == 12 + len(path)
    for held, wanted in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        assert_close(held[:, :, : cache.length], wanted[:, :, : cache.length])
    assert_close(decoder.forward(after, cache)[0], decoder.forward(after, fresh)[0])


@torch.inference_mode()
def test_rows_may_go_on_from_any_token_of_the_cache(pair: Pair) -> None:
    _, decoder = pair
    cache = Cache(decoder, 30)
    decoder.forward(tokens(12), cache)
    found, _ = decoder.forward(tokens(20)[12:17], cache, parents=(-5, 0, -1, -13, 3))
    for path, start in (([0, 1], 8), ([2], 12), ([3, 4], 0)):
        alone = Cache(decoder, 30)
        decoder.forward(tokens(20), alone)
        alone.length = start
        wanted, _ = decoder.forward(tokens(20)[12:17][path], alone)
        assert_close(found[path], wanted)
    cache.length = 12
    with pytest.raises(ValueError, match="a row follows token -2; the cache holds 12 from 0"):
        decoder.forward(tokens(2), cache, parents=(-14, 0))


@torch.inference_mode()
def test_vectors_are_read_as_embeddings_behind_the_tokens(pair: Pair) -> None:
    model, decoder = pair
    ids, parents = torch.tensor([5, 6, 7, 8, 9]), (-1, 0, 1, 0, 3)
    vectors = model.get_input_embeddings().weight[ids[3:]].detach()
    one, other = Cache(decoder, 9), Cache(decoder, 9)
    wanted, wanted_taps = decoder.forward(ids, one, (1,), parents)
    found, taps = decoder.forward(ids[:3], other, (1,), parents, vectors=vectors)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(taps, wanted_taps)
    assert one.length == other.length == 5
    with pytest.raises(ValueError, match="5 tokens and 5 more; the cache holds 9"):
        decoder.forward(ids[:3], other, (), parents, vectors=vectors)


@torch.inference_mode()
def test_a_sublayer_that_is_skipped_adds_nothing(pair: Pair) -> None:
    """Held to the library's model with the output matrices of these sublayers at 0."""
    model, decoder = pair
    skipped, without = Sublayers(attention=frozenset({1}), mlp=frozenset({1, 2})), deepcopy(model)
    _, first, second = without.model.layers
    for matrix in (first.self_attn.o_proj, first.mlp.down_proj, second.mlp.down_proj):
        matrix.weight.zero_()
    wanted = without(tokens(20)[None], output_hidden_states=True)
    cache = Cache(decoder, 20)
    parts = [decoder.partial(part, cache, skipped) for part in tokens(20).split([1, 12, 7])]
    logits = torch.cat([decoder.logits(states) for states, _ in parts])
    assert_close(logits, wanted.logits[0])
    begun = torch.cat([begun.states for _, begun in parts])
    assert parts[0][1].num_layers == 1
    assert_close(begun, wanted.hidden_states[1][0])
    assert not cache.keys[1].any()
    assert cache.keys[2].any()


@pytest.mark.parametrize(("num_layers", "parents"), [(1, (-1, 0, 1, 1, 3)), (2, None), (3, (-1, 0, 1, 1, 3))])
@torch.inference_mode()
def test_rows_that_began_in_a_part_go_on_from_there(pair: Pair, num_layers: int, parents: tuple[int] | None) -> None:
    _, decoder = pair
    begun_cache, fresh_cache = (Cache(decoder, 40) for _ in range(2))
    for cache in (begun_cache, fresh_cache):
        decoder.forward(tokens(9), cache)
    rest = frozenset(range(num_layers, 3))
    _, begun = decoder.partial(tokens(14)[9:12], begun_cache, Sublayers(rest, rest))
    assert begun.num_layers == num_layers
    begun_cache.length = 9
    begun_cache.keys[num_layers:, :, 9:] = begun_cache.values[num_layers:, :, 9:] = 9.0  # of which nothing is read
    taps = tuple(range(num_layers, 4))
    found, tapped = decoder.forward(tokens(14)[9:], begun_cache, taps, parents, begun)
    wanted, wanted_tapped = decoder.forward(tokens(14)[9:], fresh_cache, taps, parents)
    assert_close(found, wanted)
    assert_close(tapped, wanted_tapped)
    assert_close(begun_cache.keys[:, :, :14], fresh_cache.keys[:, :, :14])


def test_a_full_cache_and_a_tap_that_rows_have_left_behind_are_refused(pair: Pair) -> None:
    _, decoder = pair
    with pytest.raises(ValueError, match="rows that begin after 2 layers have no states of layer 1"):
        decoder.forward(tokens(2), Cache(decoder, 9), taps=(1,), begun=Begun(2, torch.zeros(1, 64)))
    with pytest.raises(ValueError, match="0 tokens and 9 more; the cache holds 8"):
        decoder.forward(tokens(9), Cache(decoder, 8))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type 'dynamic'"),
    ],
)
def test_another_architecture_is_refused(tiny_target: Path, changes: dict[str, object], reason: str) -> None:
    config = SimpleNamespace(**{**vars(LlamaConfig.from_pretrained(tiny_target)), "model_type": "llama", **changes})
    with pytest.raises(ValueError, match=reason):
        Decoder(config, read_tensors(tiny_target), torch.float32)


def test_a_missing_or_unknown_tensor_is_named(tiny_target: Path) -> None:
    config, tensors = LlamaConfig.from_pretrained(tiny_target), read_tensors(tiny_target)
    with pytest.raises(ValueError, match=r"extra\.weight is not"):
        Decoder(config, tensors | {"extra.weight": torch.zeros(1)}, torch.float32)
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing"):
        Decoder(config, tensors, torch.float32)


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
        assert_close(state, whole[-1], atol=1e-5)
        assert cache.length == len(text)
        assert_close(cache.keys[:, :, : len(text)], alone.keys[:, :, : len(text)], atol=1e-5)


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
    for caches in ([cache], [cache, cache]):
        with pytest.raises(ValueError, match="want as many caches, each its own; got"):
            decoder.together(torch.tensor([3, 4]), caches)
    with pytest.raises(ValueError, match="is full"):
        decoder.together(torch.tensor([3]), [Cache(decoder, 0)])
    with pytest.raises(ValueError, match="1 or more, got 0"):
        decoder.grouped(torch.tensor([3]), cache, 0)
