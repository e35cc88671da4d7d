import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.checkpoints.checkpoint import output_embedding, read_tensor
from models.drafts import Rows, chimera
from models.losses import feature_l2
from models.targets import describe
from tests.models.drafts.tiny import make_tiny, save_tiny

TINY = {"vocab_size": 64}


def make(target: Path) -> chimera.Chimera:
    """Make a draft in which every part says something."""
    draft = make_tiny(chimera, target, scale=0.1)
    assert isinstance(draft, chimera.Chimera)
    return draft


def batch(*index: int) -> Rows:
    rng = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(1, 9, 128, generator=rng), torch.randint(0, 259, (1, 13), generator=rng)
    return Rows(hidden, tokens, torch.zeros(len(index), dtype=torch.int64), torch.tensor(index))


def test_a_trigram_is_the_newest_token_and_the_two_before_and_shorter_where_a_text_begins(tiny_target: Path) -> None:
    """With layer and products silenced, what is said is U [a E(t+1) + b E(t) + c E(t−1); f(t)]."""
    draft, rows = make(tiny_target), batch(0, 1, 5)
    with torch.no_grad():
        draft.trigram.pass_through()
        weights = torch.tensor([2.0, 3.0, 5.0])
        draft.trigram.residual.weight.copy_(torch.cat([weight * torch.eye(128) for weight in weights], dim=-1))
        draft.layer["self_attn"]["o_proj"].weight.zero_()
        draft.layer["mlp"]["down_proj"].weight.zero_()
        embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[0]]
        features = draft.combine(rows.hidden)[0]
        drafted = draft.unroll(rows, 3)
        for step, one in enumerate(drafted):
            for row, index in enumerate((0, 1, 5)):
                newest = index + 1 + step
                parts = [weights[back] * embedded[newest - back] for back in range(3) if newest >= back]
                wanted = torch.stack(parts).sum(0)
                torch.testing.assert_close(one.hidden[row], wanted, rtol=1e-4, atol=1e-4)
                said = draft.heads[step].weight @ torch.cat([wanted, features[index]])
                torch.testing.assert_close(one.logits[row], said, rtol=1e-4, atol=1e-4)


def test_a_step_is_the_librarys_layer_over_features_then_guesses_then_one_trigram(tiny_target: Path) -> None:
    draft, rows = make(tiny_target), batch(6)
    config = LlamaConfig(**draft.config, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    layer.load_state_dict(draft.layers[0].state_dict())
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[0]]
    with torch.inference_mode():
        drafted, read = draft.unroll(rows, 3), draft.combine(rows.hidden)[:, :7]
        for step in range(3):
            asked = draft.trigram(embedded[5 + step : 8 + step].flip(0).flatten()[None])
            read = torch.cat([read, asked[None]], dim=1)
            positions = torch.arange(8 + step)[None]
            waves = LlamaRotaryEmbedding(config)(read, positions)
            mask = torch.full((8 + step, 8 + step), float("-inf")).triu(1)[None, None]
            made = layer(read, attention_mask=mask, position_ids=positions, position_embeddings=waves)[:, -1:]
            torch.testing.assert_close(drafted[step].hidden, made[0], rtol=1e-4, atol=1e-4)
            read = torch.cat([read[:, :-1], made], dim=1)


def test_of_the_text_itself_only_the_last_three_tokens_are_read(tiny_target: Path) -> None:
    draft, rows = make(tiny_target), batch(5)
    said = draft.unroll(rows, 3)
    for place, changed in ((3, False), (4, True), (5, True), (6, True), (9, False)):
        other = rows.token_ids.clone()
        other[0, place] = (other[0, place] + 1) % 259
        assert torch.equal(draft.unroll(rows._replace(token_ids=other), 1)[0].logits, said[0].logits) != changed


def test_a_new_draft_says_with_the_targets_output_matrix_what_its_layer_makes(tiny_target: Path) -> None:
    counts = np.zeros(259)
    counts[3:67] = 1
    draft = chimera.create(chimera.Params(**TINY), tiny_target, counts)
    for one in draft.unroll(batch(4, 8), 3):
        torch.testing.assert_close(one.logits, one.hidden @ output_embedding(tiny_target)[3:67].T)
    last = f"model.layers.{draft.num_target_layers - 1}.self_attn.v_proj.weight"
    assert torch.equal(draft.layer["self_attn"]["v_proj"].weight, read_tensor(tiny_target, last).float())


def test_every_head_learns_from_every_row_alike_and_there_is_no_token_beyond_the_last(tiny_target: Path) -> None:
    draft = make(tiny_target)
    assert draft.procedure == (feature_l2.Params(classification=1.0), "all", 1.0)
    assert (draft.num_unrolled(1), draft.num_unrolled(12), draft.max_depth) == (4, 4, 4)
    assert len(draft.unroll(batch(2), 5)) == 4


def test_the_vocabulary_stays_as_the_heads_are_learnt(tiny_target: Path) -> None:
    draft = make(tiny_target)
    counts = np.zeros(259)
    counts[100:164] = 1
    assert chimera.renew(draft, tiny_target, counts).vocabulary.tolist() == list(range(3, 67))


@pytest.mark.parametrize("number", [0, "2", None])
def test_a_draft_without_heads_is_refused(tiny_target: Path, tmp_path: Path, number: object) -> None:
    save_tiny(chimera, tiny_target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_heads": number}))
    with pytest.raises(ValueError, match=f"chimera has num_heads {number!r}; wanted a number from 1"):
        chimera.check(tmp_path, None, describe(tiny_target))


def test_a_target_or_states_that_do_not_fit_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="chimera reads targets of the Llama layout; got model_type 'gpt2'"):
        chimera.create(chimera.Params(), tmp_path, np.empty(0))
    with pytest.raises(ValueError, match="draft vocab_size must be 1 to 259, the target's; got 4096"):
        chimera.create(chimera.Params(), tiny_target, np.ones(259))
    with pytest.raises(
        ValueError, match=r"Chimera reads the target's last hidden state, 128 wide; got states of width"
    ):
        make(tiny_target).unroll(batch(4)._replace(hidden=torch.empty(1, 9, 0)), 1)
