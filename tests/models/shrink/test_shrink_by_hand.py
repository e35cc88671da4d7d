"""Depth, low rank, width and vocabulary by hand: what goes, and what is refused; `sheared` has a file."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from models.core.layers.linears import Gram, linears
from models.core.layers.reshape import take_layers
from models.params import TrainingParams
from models.shrink import depth, low_rank, norms, num_parameters, vocabulary, width
from tests.models.regimes.world import built

TRAINING = TrainingParams()
TEXTS = [list(range(3, 40)), list(range(50, 80)), [9, 8, 7, 6]]
WORDS = [[10, 20, 30, 10, 20, 10], [40, 10, 20, 30]]


@pytest.fixture
def deep(tmp_path: Path) -> PreTrainedModel:
    return built(tmp_path, num_layers=4, intermediate_size=64)


def silence(model: PreTrainedModel, number: int, scale: float) -> None:
    """Make a block add `scale` of what it adds."""
    with torch.no_grad():
        model.model.layers[number].self_attn.o_proj.weight.mul_(scale)
        model.model.layers[number].mlp.down_proj.weight.mul_(scale)


def test_a_block_that_adds_nothing_has_no_influence_and_goes_first(deep: PreTrainedModel) -> None:
    silence(deep, 2, 0)
    texts = [list(range(3, 40)), [5, 9, 7]]
    scores = depth.influence(deep, texts)
    assert scores[2] == pytest.approx(0, abs=1e-6) and (scores[[0, 1, 3]] > 0.01).all()
    less = depth.shrink(deep, texts, depth.Params(num_layers=3), TRAINING)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(less(ids).logits, deep(ids).logits)


def test_influence_is_a_mean_over_tokens_and_not_over_documents(deep: PreTrainedModel) -> None:
    long, short = list(range(3, 33)), list(range(40, 50))
    apart = [depth.influence(deep, [text]) for text in (long, short)]
    torch.testing.assert_close(depth.influence(deep, [long, short]), (30 * apart[0] + 10 * apart[1]) / 40)


def test_the_influence_of_the_last_block_is_taken_before_the_final_norm(deep: PreTrainedModel) -> None:
    text = list(range(3, 33))
    before = depth.influence(deep, [text])
    with torch.no_grad():
        deep.model.norm.weight.uniform_(-5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(depth.influence(deep, [text]), before)


def test_spread_blocks_need_no_documents(deep: PreTrainedModel) -> None:
    silence(deep, 3, 0)
    less = depth.shrink(deep, [], depth.Params(num_layers=2, keep="spread"), TRAINING)
    for block, number in zip(less.model.layers, (0, 3), strict=True):
        assert torch.equal(block.mlp.up_proj.weight, deep.model.layers[number].mlp.up_proj.weight)


@pytest.mark.parametrize("num_layers", [4, 5])
def test_a_model_that_is_no_deeper_is_refused(deep: PreTrainedModel, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"num_layers must be 1 to 3, less than the model's; got {num_layers}"):
        depth.shrink(deep, [[3, 4]], depth.Params(num_layers=num_layers), TRAINING)


def layer(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer, and 300 inputs of unequal directions."""
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randn(inputs, inputs, generator=rng) * torch.logspace(-1.5, 0.5, inputs)
    return torch.randn(outputs, inputs, generator=rng), torch.randn(300, inputs, generator=rng) @ mixed


@pytest.mark.parametrize(("outputs", "inputs"), [(24, 40), (40, 24), (32, 32)])
def test_the_error_is_the_dropped_singular_values_of_the_output(outputs: int, inputs: int) -> None:
    weight, x = layer(outputs, inputs)
    made = low_rank.truncate(weight, Gram(x), 8)
    assert torch.linalg.matrix_rank(made, rtol=1e-4) == 8
    error = float((x @ (made - weight).T).square().sum())
    dropped = torch.linalg.svdvals((x @ weight.T).double())[8:].square().sum()
    assert error == pytest.approx(float(dropped), rel=1e-3)
    left, values, right = torch.linalg.svd(weight)
    blind = left[:, :8] * values[:8] @ right[:8]
    assert error < 0.9 * float((x @ (blind - weight).T).square().sum())


def test_inputs_that_span_less_than_the_rank_leave_the_output_as_it_is() -> None:
    weight, x = layer(40, 24)
    x[:, 5:] = 0
    made = low_rank.truncate(weight, Gram(x), 8)
    torch.testing.assert_close(x @ made.T, x @ weight.T, rtol=1e-3, atol=1e-3)


def test_ranks_are_noted_and_counted_as_factors(model: PreTrainedModel) -> None:
    texts = torch.randint(3, 259, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    less = low_rank.shrink(model, texts, low_rank.Params(share=0.5), TRAINING)
    ranks = less.config.redraft["ranks"]
    assert ranks["model.layers.0.self_attn.q_proj"] == 32  # [128, 128]: 32 · 256 is half of 128²
    assert ranks["model.layers.1.mlp.down_proj"] == 42  # [128, 256]: 42.7 · 384
    for name, each in linears(less):
        assert torch.linalg.matrix_rank(each.weight, rtol=1e-4) == ranks[name]
    factors = sum(ranks[name] * sum(each.weight.shape) for name, each in linears(model))
    dense = sum(each.weight.numel() for _, each in linears(model))
    assert num_parameters(less) == num_parameters(model) - dense + factors
    one = take_layers(less, [1])
    assert num_parameters(one) == sum(parameter.numel() for parameter in one.parameters())


def test_too_little_calibration_and_too_small_a_share_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="calibration has 10 tokens; rank 42 takes at least as many"):
        low_rank.shrink(model, [list(range(3, 13))], low_rank.Params(share=0.5), TRAINING)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj is \[128, 128\]; factors of rank 1"):
        low_rank.shrink(model, [list(range(3, 13))], low_rank.Params(share=0.01), TRAINING)


@pytest.fixture
def wide(tmp_path: Path) -> PreTrainedModel:
    """4 query heads on 2 KV heads."""
    return built(tmp_path, num_heads=4, num_kv_heads=2)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(3, 20)[None]).logits


def test_parts_that_never_fire_go_and_nothing_changes(wide: PreTrainedModel) -> None:
    with torch.no_grad():
        for block in wide.model.layers:
            block.self_attn.v_proj.weight[:64] = 0  # KV head 0 hands on nothing
            block.mlp.up_proj.weight[::4] = 0
    less = width.shrink(wide, TEXTS, width.Params(num_heads=2, num_kv_heads=1, intermediate_size=192), TRAINING)
    torch.testing.assert_close(logits(less), logits(wide))


def test_the_heads_of_each_kv_head_that_fire_most_stay(wide: PreTrainedModel) -> None:
    attention = wide.model.layers[0].self_attn
    heads, _, _ = width.importance(wide, TEXTS)
    less = width.shrink(wide, TEXTS, width.Params(num_heads=2), TRAINING)
    best = heads[0].argmax(dim=-1)
    for kv_head in range(2):
        rows = slice(64 * (2 * kv_head + int(best[kv_head])), 64 * (2 * kv_head + int(best[kv_head]) + 1))
        mine = less.model.layers[0].self_attn.q_proj.weight[64 * kv_head : 64 * (kv_head + 1)]
        assert torch.equal(mine, attention.q_proj.weight[rows])
    assert torch.equal(less.model.layers[0].self_attn.k_proj.weight, attention.k_proj.weight)


def test_importance_is_a_mean_over_a_document_and_a_norm_over_documents(wide: PreTrainedModel) -> None:
    apart = [width.importance(wide, [text]) for text in TEXTS]
    together = width.importance(wide, TEXTS)
    for kind in range(3):
        wanted = torch.stack([each[kind] for each in apart]).square().sum(dim=0).sqrt()
        torch.testing.assert_close(together[kind], wanted)


def test_hidden_channels_are_judged_by_what_all_norms_hand_on(wide: PreTrainedModel) -> None:
    with torch.no_grad():
        for norm in norms(wide):
            norm.weight[::2] = 1e-3
    less = width.shrink(wide, TEXTS, width.Params(hidden_size=128), TRAINING)
    assert torch.equal(less.model.embed_tokens.weight, wide.model.embed_tokens.weight[:, 1::2])


@pytest.mark.parametrize(
    ("asked", "fault"),
    [
        ({}, "a shape is asked for by at least one of hidden_size"),
        ({"hidden_size": 512}, "hidden_size is asked to be 512, the model has 256; it can only shrink"),
        ({"num_heads": 3}, "num_heads 3 is not divisible by num_kv_heads 2"),
        ({"num_kv_heads": 1}, "4 heads on 1 KV heads are more for each than the model's 4 on 2"),
        ({"hidden_size": 130}, "hidden_size 130 is not divisible by num_heads 4"),
    ],
)
def test_an_impossible_shape_is_refused(wide: PreTrainedModel, asked: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        width.shrink(wide, TEXTS, width.Params(**asked), TRAINING)


def test_a_head_width_that_vllm_would_guess_wrong_is_refused() -> None:
    shape = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    other = Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=4, num_key_value_heads=4))
    with pytest.raises(ValueError, match="hidden_size 16 is not num_heads 4 times the head's width 8"):
        width.shrink(other, TEXTS, width.Params(hidden_size=16), TRAINING)


# The model's special tokens are 0 to 2: of them 1 begins and 2 ends a text.


def test_the_most_frequent_tokens_and_the_special_ones_stay_with_their_logits(model: PreTrainedModel) -> None:
    less = vocabulary.shrink(model, WORDS, vocabulary.Params(vocab_size=5), TRAINING)
    kept = less.config.redraft["kept_tokens"]
    assert kept == [1, 2, 10, 20, 30]
    assert (less.config.vocab_size, less.config.bos_token_id, less.config.eos_token_id) == (5, 0, 1)
    assert less.generation_config.eos_token_id == 1
    with torch.no_grad():
        mine = less(torch.tensor([[2, 3, 4, 2]])).logits
        torch.testing.assert_close(mine, model(torch.tensor([[10, 20, 30, 10]])).logits[..., kept])


def test_a_vocabulary_that_is_cut_twice_names_the_first_one_s_tokens(model: PreTrainedModel) -> None:
    less = vocabulary.shrink(model, WORDS, vocabulary.Params(vocab_size=6), TRAINING)
    least = vocabulary.shrink(less, [[2, 2, 4, 4, 3]], vocabulary.Params(vocab_size=4), TRAINING)
    assert less.config.redraft["kept_tokens"] == [1, 2, 10, 20, 30, 40]
    assert least.config.redraft["kept_tokens"] == [1, 2, 10, 30]


def test_texts_are_split_at_tokens_that_are_gone() -> None:
    assert vocabulary.narrow([10, 20, 99, 98, 1], [1, 10, 20]) == [[1, 2], [0]]
    assert vocabulary.narrow([99], [1, 10, 20]) == []


@pytest.mark.parametrize("size", [2, 259, 300])
def test_a_size_that_is_no_smaller_or_holds_no_text_is_refused(model: PreTrainedModel, size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size must be 3 to 258, .*; got {size}"):
        vocabulary.shrink(model, WORDS, vocabulary.Params(vocab_size=size), TRAINING)


@pytest.mark.parametrize(("texts", "found"), [([], "none"), ([[3, 259]], "3 to 259"), ([[-1, 4]], "-1 to 4")])
def test_tokens_of_another_vocabulary_are_refused(model: PreTrainedModel, texts: list[list[int]], found: str) -> None:
    with pytest.raises(ValueError, match=f"documents must hold token ids of 0 to 258; got {found}"):
        vocabulary.shrink(model, texts, vocabulary.Params(vocab_size=20), TRAINING)
