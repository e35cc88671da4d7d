"""Width: what fires little goes, and shapes that no loader takes are refused."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from models.params import TrainingParams
from models.shrink import norms, width
from tests.models.regimes.world import built

TRAINING = TrainingParams()
TEXTS = [list(range(3, 40)), list(range(50, 80)), [9, 8, 7, 6]]


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    """4 query heads on 2 KV heads."""
    return built(tmp_path, num_heads=4, num_kv_heads=2)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(3, 20)[None]).logits


def test_parts_that_never_fire_go_and_nothing_changes(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.v_proj.weight[:64] = 0  # KV head 0 hands on nothing
            block.mlp.up_proj.weight[::4] = 0
    less = width.shrink(model, TEXTS, width.Params(num_heads=2, num_kv_heads=1, intermediate_size=192), TRAINING)
    torch.testing.assert_close(logits(less), logits(model))


def test_the_heads_of_each_kv_head_that_fire_most_stay(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    heads, _, _ = width.importance(model, TEXTS)
    less = width.shrink(model, TEXTS, width.Params(num_heads=2), TRAINING)
    best = heads[0].argmax(dim=-1)
    for kv_head in range(2):
        rows = slice(64 * (2 * kv_head + int(best[kv_head])), 64 * (2 * kv_head + int(best[kv_head]) + 1))
        mine = less.model.layers[0].self_attn.q_proj.weight[64 * kv_head : 64 * (kv_head + 1)]
        assert torch.equal(mine, attention.q_proj.weight[rows])
    assert torch.equal(less.model.layers[0].self_attn.k_proj.weight, attention.k_proj.weight)


def test_importance_is_a_mean_over_a_document_and_a_norm_over_documents(model: PreTrainedModel) -> None:
    apart = [width.importance(model, [text]) for text in TEXTS]
    together = width.importance(model, TEXTS)
    for kind in range(3):
        wanted = torch.stack([each[kind] for each in apart]).square().sum(dim=0).sqrt()
        torch.testing.assert_close(together[kind], wanted)


def test_hidden_channels_are_judged_by_what_all_norms_hand_on(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for norm in norms(model):
            norm.weight[::2] = 1e-3
    less = width.shrink(model, TEXTS, width.Params(hidden_size=128), TRAINING)
    assert torch.equal(less.model.embed_tokens.weight, model.model.embed_tokens.weight[:, 1::2])


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
def test_an_impossible_shape_is_refused(model: PreTrainedModel, asked: dict[str, int], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        width.shrink(model, TEXTS, width.Params(**asked), TRAINING)


def test_a_head_width_that_vllm_would_guess_wrong_is_refused() -> None:
    config = Qwen2Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with pytest.raises(ValueError, match="hidden_size 16 is not num_heads 4 times the head's width 8"):
        width.shrink(Qwen2ForCausalLM(config), TEXTS, width.Params(hidden_size=16), TRAINING)
