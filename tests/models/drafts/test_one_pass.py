"""Heads that draft all tokens in one pass: `dflash` a block, `parallel_eagle` a place for each."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from models import catalog
from models.drafts import Rows, dflash, parallel_eagle
from tests.models.drafts.tiny import make_tiny, require_refused, save_tiny


def rows_of(hidden: torch.Tensor, token_ids: torch.Tensor, **more: torch.Generator) -> Rows:
    index = torch.arange(hidden.shape[1])
    return Rows(hidden, token_ids, torch.zeros_like(index), index, **more)


def states(draft: torch.nn.Module, length: int) -> torch.Tensor:
    return torch.randn(1, length, draft.fc.in_features, generator=torch.Generator().manual_seed(0))


def by_hand(draft: dflash.DFlash, hidden: torch.Tensor, last: int) -> torch.Tensor:
    """Draft one block as vLLM's module does, layer by layer over text and block side by side; return logits [K, D]."""
    length, size, width = len(hidden), draft.config["block_size"], draft.head_dim
    token_ids = torch.tensor([last] + [draft.mask_token_id] * (size - 1))
    text, x = draft.normed(draft.fc(hidden), draft.hidden_norm), draft.embedding[token_ids]
    angles = torch.arange(length + size)[:, None, None] * draft.frequencies
    for layer in draft.layers:
        parts = layer.self_attn
        read = torch.cat([text, draft.normed(x, layer.input_layernorm)])
        queries, keys, values = (parts[f"{name}_proj"](read).unflatten(-1, (-1, width)) for name in "qkv")
        turned = []
        for heads, norm in ((queries, parts.q_norm), (keys, parts.k_norm)):
            first, second = draft.normed(heads, norm).chunk(2, dim=-1)
            cos, sin = angles.cos(), angles.sin()
            turned.append(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
        queries, keys = turned[0][length:], turned[1]
        group = draft.num_heads // draft.num_kv_heads
        keys, values = (heads.repeat_interleave(group, 1) for heads in (keys, values))
        weights = (torch.einsum("shw,thw->hst", queries, keys) / width**0.5).softmax(-1)
        x = x + parts.o_proj(torch.einsum("hst,thw->shw", weights, values).flatten(1))
        y = draft.normed(x, layer.post_attention_layernorm)
        x = x + layer.mlp.down_proj(torch.nn.functional.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))
    return draft.lm_head(draft.normed(x[1:], draft.norm))


def test_a_block_of_dflash_is_what_attention_over_text_and_block_side_by_side_gives(tiny_target: Path) -> None:
    draft = make_tiny(dflash, tiny_target)
    hidden, token_ids = states(draft, 5), torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        unrolled = draft.unroll(rows_of(hidden, token_ids), 7)
        for row in (0, 2, 4):
            wanted = by_hand(draft, hidden[0, : row + 1], int(token_ids[0, row + 1]))
            torch.testing.assert_close(torch.stack([step.logits[row] for step in unrolled]), wanted)


def test_one_pass_fills_a_block_and_nothing_follows_it(tiny_target: Path) -> None:
    draft = make_tiny(dflash, tiny_target)
    passes: list[tuple[int, ...]] = []
    draft.layers[1].self_attn.o_proj.register_forward_hook(lambda module, given, out: passes.append(tuple(out.shape)))
    drafter = draft.drafter(40)
    with torch.inference_mode():
        drafter.extend(torch.arange(3, 13), states(draft, 9)[0])
        proposal = drafter.propose(20, lambda logits: (int(draft.vocabulary[logits.argmax()]), None))
        path = [3, 4, 5, 6, 7, 8, 9]
        one, other, deep = drafter.expand([5, 6, *path], [-1, -1, -1, *range(2, 8)], [0, 1, 8])
    assert passes == [(1, 8, 128)]
    assert proposal.num_tokens == draft.max_depth == draft.num_unrolled(2) == 7
    assert torch.equal(one, other)
    assert torch.isneginf(deep).all()


def test_vllm_serves_whole_blocks_of_dflash(tiny_target: Path, tmp_path: Path) -> None:
    vllm = catalog.load("engines", "vllm")
    vllm.require_draft(dflash.Params(), vllm.Params(num_draft_tokens=7))
    with pytest.raises(ValueError, match=r"got blocks of 8 for 3 tokens: set block_size = 4 in \[draft\]"):
        vllm.require_draft(dflash.Params(), vllm.Params(num_draft_tokens=3))
    save_tiny(dflash, tiny_target, tmp_path)
    assert dflash.vllm_config(tmp_path)["num_speculative_tokens"] == 7


def test_later_places_of_parallel_eagle_read_neither_what_came_nor_what_was_drafted(tiny_target) -> None:
    draft = make_tiny(parallel_eagle, tiny_target)
    hidden = states(draft, 4)
    token_ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    changed = torch.tensor([[5, 6, 7, 8, 9, 20, 21, 22]])  # the last row's later tokens
    one, other = (draft.unroll(rows_of(hidden, ids), 3) for ids in (token_ids, changed))
    assert all(torch.equal(a.logits[-1], b.logits[-1]) for a, b in zip(one, other, strict=True))
    last = torch.stack([step.logits[-1] for step in one])
    assert not torch.allclose(last[1], last[2])  # places are told apart


def test_the_first_place_is_an_eagle3_heads_and_the_later_ones_hang_on_the_learnt_vector(tiny_target: Path) -> None:
    draft = make_tiny(parallel_eagle, tiny_target)
    hidden = states(draft, 4)
    rows = rows_of(hidden, torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]]))
    before = draft.unroll(rows, 3)
    with torch.no_grad():
        draft.mask_hidden.neg_()
    after = draft.unroll(rows, 3)
    assert [torch.equal(a.logits, b.logits) for a, b in zip(before, after, strict=True)] == [True, False, False]


def test_all_places_of_parallel_eagle_cost_one_pass(tiny_target: Path) -> None:
    draft = make_tiny(parallel_eagle, tiny_target)
    passes: list[int] = []
    draft.layer["self_attn"]["o_proj"].register_forward_hook(lambda module, given, out: passes.append(len(out)))
    drafter = draft.drafter(40)
    with torch.inference_mode():
        drafter.extend(torch.arange(3, 13), torch.randn(9, draft.fc.in_features))
        drafter.propose(6, lambda logits: (int(draft.vocabulary[logits.argmax()]), None))
        one, other = drafter.expand([5, 6], [-1, -1], [0, 1])
    assert passes == [6]
    assert torch.equal(one, other)


def test_in_training_each_place_keeps_its_share_of_the_rows_but_never_fewer_than_the_least(tiny_target: Path) -> None:
    draft = make_tiny(parallel_eagle, tiny_target)
    hidden = torch.randn(1, 100, draft.fc.in_features)
    rows = rows_of(hidden, torch.full((1, 110), 5), rng=torch.Generator().manual_seed(0))
    unrolled = draft.unroll(rows, 7)
    assert [len(step.running) for step in unrolled] == [100, 70, 49, 34, 24, 20, 20]
    for earlier, later in pairwise(unrolled):
        assert set(later.running.tolist()) <= set(earlier.running.tolist())
    assert [len(step.running) for step in draft.unroll(rows._replace(rng=None), 7)] == [100] * 7


def test_a_directory_of_parallel_eagle_is_in_vllms_layout(tiny_target: Path, tmp_path: Path) -> None:
    save_tiny(parallel_eagle, tiny_target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    draft = parallel_eagle.load(tmp_path, tiny_target)
    assert (config["architectures"], config["ptd_token_id"]) == (["Eagle3LlamaForCausalLM"], 258)
    assert draft.state_dict()["mask_hidden"].shape == (1, draft.fc.in_features)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            dflash,
            {"dflash_config": {"mask_token_id": 259}},
            "a token of 0 to 258, the target's; got 259",
        ),
        (dflash, {"dflash_config": None}, "a token of 0 to 258, the target's; got None"),
        (dflash, {"block_size": 1}, "block_size must be a number from 2; got 1"),
        (dflash, {"block_size": "8"}, "block_size must be a number from 2; got '8'"),
        (dflash, {"num_hidden_layers": 3}, "tensor layers.2.input_layernorm.weight is missing"),
        (dflash, {"num_hidden_layers": 0}, "num_hidden_layers must be a number from 1; got 0"),
        (parallel_eagle, {"ptd_token_id": 259}, "a token of 0 to 258, the target's; got 259"),
        (parallel_eagle, {"ptd_token_id": -1}, "a token of 0 to 258, the target's; got -1"),
        (parallel_eagle, {"ptd_token_id": "pad"}, "a token of 0 to 258, the target's; got pad"),
    ],
)
def test_a_draft_whose_config_does_not_fit_is_refused(tiny_target, tmp_path, family, changes, message) -> None:
    require_refused(family, tiny_target, tmp_path, message, **changes)
