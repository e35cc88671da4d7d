import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.checkpoints.checkpoint import output_embedding, read_tensor
from models.drafts import Rows, clover
from models.losses import feature_regression
from models.targets import describe
from tests.models.drafts.tiny import make_tiny, save_tiny

TINY = {"vocab_size": 64}


def make(target: Path) -> clover.Clover:
    """Make a draft in which every part says something."""
    draft = make_tiny(clover, target, scale=0.1)
    assert isinstance(draft, clover.Clover)
    return draft


def test_an_attention_decoder_by_hand() -> None:
    """Two heads of width 1, whose cosines are the signs of the products; h = [3, −4] / √12.5 after the norm."""
    decoder = clover.AttentionDecoder(2, 2, 1e-5)
    decoder.add_nothing()
    state, embedded = torch.tensor([3.0, -4.0]), torch.tensor([0.5, 2.0])
    assert torch.equal(decoder(state, embedded), state)
    with torch.no_grad():
        decoder.v.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        decoder.v.bias.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(decoder(state, embedded), torch.tensor([3 + 2.5, -4 - 3.0]))
    one = clover.AttentionDecoder(2, 1, 1e-5)
    one.add_nothing()
    with torch.no_grad():
        one.v.weight.copy_(torch.eye(2))
    weight = (3 * 0.5 - 4 * 2) / (5 * (0.25 + 4) ** 0.5)
    torch.testing.assert_close(one(state, embedded), state + weight * embedded, rtol=1e-4, atol=1e-4)


def test_a_new_draft_says_what_the_target_would_with_its_last_layer_once_more(tiny_target: Path) -> None:
    draft = clover.create(clover.Params(**TINY), tiny_target, np.arange(259))
    hidden, tokens = torch.randn(1, 9, 128), torch.full((1, 20), 5)
    config = LlamaConfig(**draft.config, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    last = draft.num_target_layers - 1
    layer.load_state_dict(
        {name: read_tensor(tiny_target, f"model.layers.{last}.{name}") for name in layer.state_dict()}
    )
    with torch.inference_mode():
        positions = torch.arange(9)[None]
        waves = LlamaRotaryEmbedding(config)(hidden, positions)
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        made = layer(hidden, attention_mask=mask, position_ids=positions, position_embeddings=waves)
        normed = functional.rms_norm(made, (128,), draft.target_norm, draft.eps)
        wanted = (normed @ output_embedding(tiny_target)[195:].T)[0, [4, 8]]
        drafted = draft.unroll(Rows(hidden, tokens, torch.tensor([0, 0]), torch.tensor([4, 8])), 3)
    for one in drafted:
        torch.testing.assert_close(one.logits, wanted, rtol=1e-3, atol=1e-3)


def test_later_steps_are_the_recurrence_of_the_paper(tiny_target: Path) -> None:
    draft = make(tiny_target)
    hidden, tokens = torch.randn(1, 9, 128), torch.arange(3, 23)[None]
    embedding = output_embedding(tiny_target)
    with torch.inference_mode():
        drafted = draft.unroll(Rows(hidden, tokens, torch.tensor([0]), torch.tensor([6])), 3)
        mixed, keys, values = draft.context(hidden, tokens[:, 1:10])
        rest = (torch.tensor([0]), torch.tensor([6]), keys, values, [])
        told = draft.advance(0, mixed[:, 6], tokens[:, 7], *rest)[:, :128]
        for step in (1, 2):
            read = embedding[tokens[0, 7 + step]][None]
            told = draft.regressive(told, read)
            said = torch.cat([told, read], dim=-1) @ draft.later.weight.T + draft.later.bias
            normed = functional.rms_norm(said, (128,), draft.norm.weight, draft.eps)
            torch.testing.assert_close(drafted[step].hidden, normed, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(drafted[step].logits, normed @ embedding[3:67].T, rtol=1e-3, atol=1e-3)


def test_what_a_head_says_hangs_on_the_tokens_before_and_on_no_later_one(tiny_target: Path) -> None:
    draft, hidden = make(tiny_target), torch.randn(1, 2, 128)
    tokens, other = torch.tensor([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11, 10]]).unsqueeze(1)
    one, two = (draft.unroll(Rows(hidden, text, torch.tensor([0]), torch.tensor([1])), 4) for text in (tokens, other))
    # Row 1 goes on from tokens 6, 7: steps read 7; 8; then the changed one, and one after it.
    assert [torch.equal(a.logits, b.logits) for a, b in zip(one, two, strict=True)] == [True, True, False, False]


def test_drafted_tokens_leave_no_keys(tiny_target: Path) -> None:
    draft = make(tiny_target)
    mixed, keys, values = draft.context(torch.randn(1, 6, 128), torch.arange(3, 9)[None])
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    state, token, zero = mixed[:, 5], torch.tensor([8]), torch.tensor([0])
    for step in range(4):
        state = draft.advance(step, state, token, zero, zero + 5, keys, values, own)
    assert own == []


def test_every_head_learns_from_every_row_and_later_ones_count_less(tiny_target: Path) -> None:
    draft = clover.create(clover.Params(num_heads=3, **TINY), tiny_target, np.ones(259))
    assert draft.procedure == (feature_regression.Params(classification=0.1), "all", 0.7)
    assert (draft.num_unrolled(2), draft.num_unrolled(12), draft.max_depth) == (2, 3, None)


def test_the_vocabulary_follows_the_traffic_and_changes_nothing_else(tiny_target: Path) -> None:
    draft = make(tiny_target)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items() if name != "token_map"}
    counts = np.zeros(259)
    counts[100:164] = 1
    after = clover.renew(draft, tiny_target, counts)
    assert after.vocabulary.tolist() == list(range(100, 164))
    assert torch.equal(after.output.weight, output_embedding(tiny_target)[100:164])
    assert len(after.embedding) == 259
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 4}, "differs from the served draft in num_heads"),
        ({"draft_vocab_size": None}, "draft_vocab_size None; wanted a number from 1"),
        ({"hidden_size": 64}, "hidden_size 64, the target has 128"),
        ({"num_attention_heads": 3}, "differs from the served draft in num_attention_heads"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tiny_target: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    (saved := tmp_path / "saved").mkdir()
    save_tiny(clover, tiny_target, saved)
    shutil.copy(saved / "model.safetensors", tmp_path)
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        clover.check(tmp_path, saved, describe(tiny_target))


def test_heads_that_can_not_be_are_refused(tiny_target: Path) -> None:
    config = make(tiny_target).config
    with pytest.raises(ValueError, match="clover has num_heads 0; wanted a number from 1"):
        clover.Clover({**config, "num_heads": 0})
    with pytest.raises(ValueError, match="clover's 3 attention heads share a width that they divide; got 128"):
        clover.Clover({**config, "num_attention_heads": 3})


def test_a_target_or_a_vocabulary_that_does_not_fit_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft vocab_size must be 1 to 259, the target's; got 4096"):
        clover.create(clover.Params(), tiny_target, np.ones(259))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="clover reads targets of the Llama layout; got model_type 'gpt2'"):
        clover.create(clover.Params(), tmp_path, np.empty(0))
    rows = Rows(torch.empty(1, 9, 0), torch.full((1, 20), 5), torch.tensor([0]), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"reads the target's last hidden state, 128 wide; got states of width 0"):
        make(tiny_target).unroll(rows, 1)
