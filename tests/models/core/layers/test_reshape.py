from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from models.core.layers.reshape import Kept, spread_layers, take_layers, take_widths
from tests.models.regimes.world import built


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return built(tmp_path_factory.mktemp("target"), num_layers=3, num_heads=4, num_kv_heads=2)


def qwen2() -> PreTrainedModel:
    """A model with biases, an output matrix of its own and two types of layers."""
    config = Qwen2Config(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["full_attention", "sliding_attention"] * 2, sliding_window=8,
        use_sliding_window=True, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.arange(3, 20)[None], use_cache=False).logits


@pytest.mark.parametrize(
    ("num_layers", "num_kept", "kept"), [(4, 2, [0, 3]), (12, 6, [0, 2, 4, 7, 9, 11]), (5, 1, [0]), (3, 3, [0, 1, 2])]
)
def test_layers_are_spread_from_the_first_to_the_last(num_layers: int, num_kept: int, kept: list[int]) -> None:
    assert spread_layers(num_layers, num_kept) == kept


def test_a_model_in_bfloat16_stays_one_with_its_positions_in_float32(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    same = take_layers(half, [0, 1, 2])
    assert same.dtype == torch.bfloat16 and torch.equal(logits(same), logits(half))
    assert same.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("kept", [[], [1, 0], [0, 3], [-1, 0]])
def test_blocks_that_are_not_there_are_refused(model: PreTrainedModel, kept: list[int]) -> None:
    with pytest.raises(ValueError, match="kept layers must ascend within 0 to 2"):
        take_layers(model, kept)


def test_heads_and_channels_that_add_nothing_can_be_taken_out() -> None:
    whole = qwen2()
    width = whole.model.layers[0].self_attn.head_dim
    with torch.no_grad():
        for block in whole.model.layers:
            block.self_attn.o_proj.weight[:, : 2 * width] = 0  # heads 0 and 1, all of KV head 0
            block.self_attn.o_proj.weight[:, 3 * width :] = 0  # of KV head 1 head 3
            block.mlp.down_proj.weight[:, ::2] = 0
    num_layers, channels = whole.config.num_hidden_layers, whole.config.intermediate_size
    heads, kv_heads = (torch.tensor([[number]] * num_layers) for number in (2, 1))
    kept = Kept(heads=heads, kv_heads=kv_heads, channels=torch.arange(1, channels, 2).repeat(num_layers, 1))
    less = take_widths(whole, kept)
    torch.testing.assert_close(logits(less), logits(whole))
    assert less.config.num_attention_heads == less.config.num_key_value_heads == 1
    assert less.config.head_dim == width and less.config.intermediate_size == channels // 2
    assert less.config.hidden_size == whole.config.hidden_size
    assert take_layers(less, [1, 2]).config.layer_types == ["sliding_attention", "full_attention"]


def test_a_narrower_stream_keeps_the_channels_it_is_told(model: PreTrainedModel) -> None:
    hidden = torch.arange(0, 256, 2)
    less = take_widths(model, Kept(hidden=hidden))
    block, was = less.model.layers[1], model.model.layers[1]
    assert torch.equal(block.mlp.up_proj.weight, was.mlp.up_proj.weight[:, hidden])
    assert torch.equal(block.self_attn.o_proj.weight, was.self_attn.o_proj.weight[hidden])
    assert torch.equal(less.model.norm.weight, model.model.norm.weight[hidden])
    assert less.lm_head.weight is less.model.embed_tokens.weight


def test_fewer_tokens_leave_the_logits_of_the_others() -> None:
    whole, tokens = qwen2(), torch.tensor([*range(3, 20), 30])
    less = take_widths(whole, Kept(tokens=tokens))
    with torch.no_grad():
        mine = less(torch.arange(17)[None], use_cache=False).logits
    torch.testing.assert_close(mine, logits(whole)[..., tokens])


def test_a_tensor_that_is_not_known_is_named(model: PreTrainedModel) -> None:
    whole = take_layers(model, [0])
    whole.model.layers[0].mlp.router = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.0\.mlp\.router\.weight is not one of"):
        take_widths(whole, Kept(hidden=torch.arange(8)))
