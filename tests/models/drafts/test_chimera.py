from functools import partial
from pathlib import Path

import numpy as np
import torch

from models.core.checkpoints.checkpoint import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.drafts import chimera
from tests.models.drafts.tiny import library_layer, make_tiny, rows_at

TINY = {"vocab_size": 64}
make = partial(make_tiny, chimera, scale=0.1)  # every part says something


def test_a_trigram_is_the_newest_token_and_the_two_before_and_shorter_where_a_text_begins(tiny_target: Path) -> None:
    """With layer and products silenced, what is said is U [a E(t+1) + b E(t) + c E(t−1); f(t)]."""
    draft, rows = make(tiny_target), rows_at(0, 1, 5)
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
    draft, rows = make(tiny_target), rows_at(6)
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[0]]
    with torch.inference_mode():
        drafted, read = draft.unroll(rows, 3), draft.combine(rows.hidden)[:, :7]
        for step in range(3):
            asked = draft.trigram(embedded[5 + step : 8 + step].flip(0).flatten()[None])
            read = torch.cat([read, asked[None]], dim=1)
            made = library_layer(draft, read[0])[None, -1:]
            torch.testing.assert_close(drafted[step].hidden, made[0], rtol=1e-4, atol=1e-4)
            read = torch.cat([read[:, :-1], made], dim=1)


def test_of_the_text_itself_only_the_last_three_tokens_are_read(tiny_target: Path) -> None:
    draft, rows = make(tiny_target), rows_at(5)
    said = draft.unroll(rows, 3)
    for place, changed in ((3, False), (4, True), (5, True), (6, True), (9, False)):
        other = rows.token_ids.clone()
        other[0, place] = (other[0, place] + 1) % 259
        assert torch.equal(draft.unroll(rows._replace(token_ids=other), 1)[0].logits, said[0].logits) != changed


def test_a_new_draft_says_with_the_targets_output_matrix_what_its_layer_makes(tiny_target: Path) -> None:
    counts = np.zeros(259)
    counts[3:67] = 1
    draft = chimera.create(chimera.Params(**TINY), tiny_target, counts)
    for one in draft.unroll(rows_at(4, 8), 3):
        torch.testing.assert_close(one.logits, one.hidden @ output_embedding(tiny_target)[3:67].T)
    last = f"model.layers.{draft.num_target_layers - 1}.self_attn.v_proj.weight"
    assert torch.equal(draft.layer["self_attn"]["v_proj"].weight, read_tensor(tiny_target, last).float())
