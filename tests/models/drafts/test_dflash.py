import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models import catalog
from models.drafts import Rows, dflash
from tests.models.drafts.tiny import make_tiny, require_refused, save_tiny

TINY = {"vocab_size": 64}
SERVED = {"block_size": 4}
make = partial(make_tiny, dflash)


def rows_of(hidden: torch.Tensor, token_ids: torch.Tensor) -> Rows:
    index = torch.arange(hidden.shape[1])
    return Rows(hidden, token_ids, torch.zeros_like(index), index)


def states(draft: dflash.DFlash, length: int) -> torch.Tensor:
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


def test_a_block_is_what_attention_over_text_and_block_side_by_side_gives(tiny_target: Path) -> None:
    draft = make(tiny_target)
    hidden, token_ids = states(draft, 5), torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    with torch.no_grad():
        unrolled = draft.unroll(rows_of(hidden, token_ids), 7)
        for row in (0, 2, 4):
            wanted = by_hand(draft, hidden[0, : row + 1], int(token_ids[0, row + 1]))
            torch.testing.assert_close(torch.stack([step.logits[row] for step in unrolled]), wanted)


def test_states_reach_every_layer_by_its_keys_and_values(tiny_target: Path) -> None:
    """With the first layer's products of the states cut off, what is said still hangs on the states."""
    draft = make(tiny_target)
    one, other = (torch.randn(1, 4, draft.fc.in_features) for _ in range(2))
    token_ids = torch.arange(5, 14)[None]
    with torch.no_grad():
        draft.layers[0].self_attn.v_proj.weight.zero_()
        for hidden in (one, other):
            assert torch.isfinite(draft.unroll(rows_of(hidden, token_ids), 1)[0].logits).all()
        said = [draft.unroll(rows_of(hidden, token_ids), 1)[0].logits for hidden in (one, other)]
        assert not torch.allclose(*said)
        draft.layers[1].self_attn.v_proj.weight.zero_()
        said = [draft.unroll(rows_of(hidden, token_ids), 1)[0].logits for hidden in (one, other)]
        torch.testing.assert_close(*said)


def test_a_block_reads_no_later_token_and_all_of_its_places_read_each_other(tiny_target: Path) -> None:
    draft = make(tiny_target)
    hidden = states(draft, 4)
    before = draft.unroll(rows_of(hidden, torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])), 3)
    after = draft.unroll(rows_of(hidden, torch.tensor([[5, 6, 7, 8, 9, 20, 21, 22]])), 3)
    assert all(torch.equal(a.logits[-1], b.logits[-1]) for a, b in zip(before, after, strict=True))
    shorter = dflash.DFlash({**draft.config, "block_size": 3}).borrow(tiny_target)
    shorter.load_state_dict(draft.state_dict())
    [first, _] = shorter.unroll(rows_of(hidden, torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])), 3)
    assert not torch.allclose(first.logits, before[0].logits)  # the first place sees the ones behind it


def test_one_pass_fills_a_block_and_nothing_follows_it(tiny_target: Path) -> None:
    draft = make(tiny_target)
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


def test_a_directory_is_in_the_layout_of_vllms_dflash(tiny_target: Path, tmp_path: Path) -> None:
    save_tiny(dflash, tiny_target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": 258, "causal": False}
    assert (config["model_type"], config["num_hidden_layers"], config["block_size"]) == ("qwen3", 2, 8)
    layer = {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"} | {
        f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    names = {f"layers.{number}.{name}.weight" for number in range(2) for name in layer}
    rest = {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t"}
    assert set(load_file(tmp_path / "model.safetensors")) == names | rest


def test_vllm_serves_whole_blocks(tiny_target: Path, tmp_path: Path) -> None:
    vllm = catalog.load("engines", "vllm")
    vllm.require_draft(dflash.Params(), vllm.Params(num_draft_tokens=7))
    with pytest.raises(ValueError, match=r"got blocks of 8 for 3 tokens: set block_size = 4 in \[draft\]"):
        vllm.require_draft(dflash.Params(), vllm.Params(num_draft_tokens=3))
    save_tiny(dflash, tiny_target, tmp_path)
    assert dflash.vllm_config(tmp_path)["num_speculative_tokens"] == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {"mask_token_id": 259}}, "the mask must be a token of 0 to 258, the target's; got 259"),
        ({"dflash_config": None}, "the mask must be a token of 0 to 258, the target's; got None"),
        ({"block_size": 1}, "block_size must be a number from 2; got 1"),
        ({"block_size": "8"}, "block_size must be a number from 2; got '8'"),
        ({"num_hidden_layers": 3}, "tensor layers.2.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a number from 1; got 0"),
    ],
)
def test_a_draft_whose_config_does_not_fit_is_refused(
    tiny_target: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    require_refused(dflash, tiny_target, tmp_path, message, **changes)
