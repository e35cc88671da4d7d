from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from models.core.checkpoints.checkpoint import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.drafts import Rows, clover
from tests.models.drafts.tiny import library_layer, make_tiny, rows_at

TINY = {"vocab_size": 64}
make = partial(make_tiny, clover, scale=0.1)  # every part says something


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
    last = f"model.layers.{draft.num_target_layers - 1}.self_attn.v_proj.weight"
    assert torch.equal(draft.layer["self_attn"]["v_proj"].weight, read_tensor(tiny_target, last).float())
    rows = rows_at(4, 8)
    with torch.inference_mode():
        made = library_layer(draft, rows.hidden[0])
        normed = functional.rms_norm(made, (128,), draft.target_norm, draft.eps)
        wanted = (normed @ output_embedding(tiny_target)[195:].T)[[4, 8]]
        drafted = draft.unroll(rows, 3)
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


def test_drafted_tokens_leave_no_keys(tiny_target: Path) -> None:
    draft = make(tiny_target)
    mixed, keys, values = draft.context(torch.randn(1, 6, 128), torch.arange(3, 9)[None])
    own: list[tuple[torch.Tensor, torch.Tensor]] = []
    state, token, zero = mixed[:, 5], torch.tensor([8]), torch.tensor([0])
    for step in range(4):
        state = draft.advance(step, state, token, zero, zero + 5, keys, values, own)
    assert own == []


def test_heads_that_can_not_be_are_refused(tiny_target: Path) -> None:
    config = make(tiny_target).config
    with pytest.raises(ValueError, match="clover's 3 attention heads share a width that they divide; got 128"):
        clover.Clover({**config, "num_attention_heads": 3})
