"""The EAGLE-3 head against a sequential draft, and its checkpoint against every way to spoil one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.checkpoints.checkpoint import output_embedding
from models.drafts import Rows, eagle3
from models.targets import describe

HIDDEN, WIDTH = 128, 64
TINY = {"vocab_size": 64}


@pytest.fixture(scope="module")
def head(tiny_target: Path, tiny_draft: Path) -> eagle3.Eagle3:
    return eagle3.load(tiny_draft, tiny_target)


def draft_one_by_one(
    head: eagle3.Eagle3, hidden: Tensor, token_ids: Tensor, index: int, num_steps: int
) -> list[Tensor]:
    """What an engine does: a growing cache of keys and values, one position a pass."""
    keys, values, logits = [], [], []
    for t in range(index + 1):
        combined = head.fc(hidden[t])
        joined = head.join(combined, token_ids[t + 1])
        key, value = head.keys_values(joined, torch.tensor(t))
        keys.append(key)
        values.append(value)
    state = combined
    for step in range(num_steps):
        joined = head.join(state, token_ids[index + 1 + step])
        if step > 0:
            key, value = head.keys_values(joined, torch.tensor(index + step))
            keys.append(key)
            values.append(value)
        query = head.rotated(head.midlayer["self_attn"]["q_proj"](joined), head.num_heads, torch.tensor(index + step))
        groups = head.num_heads // head.num_kv_heads
        k = torch.stack(keys).repeat_interleave(groups, 1)
        v = torch.stack(values).repeat_interleave(groups, 1)
        weights = (torch.einsum("hw,thw->ht", query, k) * head.head_dim**-0.5).softmax(-1)
        attended = torch.einsum("ht,thw->hw", weights, v).flatten()
        state = head.feed_forward(head.midlayer, state + head.midlayer["self_attn"]["o_proj"](attended))
        logits.append(head.lm_head(head.normed(state, head.norm)))
    return logits


def test_a_packed_unroll_drafts_as_an_engine_does_position_by_position(head: eagle3.Eagle3) -> None:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, head.fc.in_features, generator=rng)
    tokens = torch.randint(0, 259, (2, 13), generator=rng)
    rows = Rows(hidden, tokens, torch.tensor([0, 0, 1]), torch.tensor([3, 6, 5]))
    with torch.inference_mode():
        packed = head.unroll(rows, 3)
        for row, (sequence, index) in enumerate([(0, 3), (0, 6), (1, 5)]):
            for step, wanted in enumerate(draft_one_by_one(head, hidden[sequence], tokens[sequence], index, 3)):
                torch.testing.assert_close(packed[step][1][row], wanted, rtol=1e-4, atol=1e-4)


def test_rows_that_are_not_kept_do_not_change_the_others(head: eagle3.Eagle3) -> None:
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, 8, head.fc.in_features, generator=rng)
    rows = Rows(
        hidden, torch.randint(0, 259, (1, 12), generator=rng), torch.zeros(4, dtype=torch.int64), torch.arange(2, 6)
    )
    with torch.inference_mode():
        everything = head.unroll(rows, 2)
        odd = head.unroll(rows, 2, lambda step, running, logits: rows.index[running] % 2 == 1)
    assert odd[1][0].tolist() == [1, 3]
    torch.testing.assert_close(odd[1][1], everything[1][1][[1, 3]])


def test_a_new_head_starts_from_the_targets_last_layer(tiny_target: Path) -> None:
    head = eagle3.create(eagle3.Params(vocab_size=10), tiny_target, np.arange(259))
    assert head.vocabulary.tolist() == list(range(249, 259))
    last = eagle3.read_tensor(tiny_target, "model.layers.1.mlp.up_proj.weight").float()
    torch.testing.assert_close(head.midlayer["mlp"]["up_proj"].weight.detach(), last)
    assert head.midlayer["self_attn"]["q_proj"].weight[:, :HIDDEN].abs().max() == 0


def test_a_saved_head_loads_back_equal_to_bfloat16(head: eagle3.Eagle3, tiny_target: Path, tmp_path: Path) -> None:
    eagle3.save(head, tmp_path)
    again = eagle3.load(tmp_path, tiny_target)
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_renewing_the_vocabulary_keeps_learned_rows_and_takes_new_ones_from_the_target(
    tiny_target: Path, tiny_draft: Path
) -> None:
    head = eagle3.load(tiny_draft, tiny_target)
    old, before = head.vocabulary.tolist(), head.lm_head.weight.detach().clone()
    counts = np.zeros(259)
    counts[40:104] = 1
    eagle3.renew(head, tiny_target, counts)
    assert head.vocabulary.tolist() == list(range(40, 104))
    torch.testing.assert_close(head.lm_head.weight[0].detach(), before[old.index(40)])
    torch.testing.assert_close(head.lm_head.weight[-1].detach(), output_embedding(tiny_target)[103])


def test_positions_are_scaled_as_the_config_says(tiny_draft: Path) -> None:
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = json.loads((tiny_draft / "config.json").read_text())
    config["rope_parameters"] |= {**scaled, "original_max_position_embeddings": 512}
    wanted = LlamaRotaryEmbedding(LlamaConfig(**config))
    head = eagle3.Eagle3(config, torch.empty(1, 1))
    assert not torch.equal(
        head.frequencies,
        eagle3.Eagle3(json.loads((tiny_draft / "config.json").read_text()), torch.empty(1, 1)).frequencies,
    )
    torch.testing.assert_close(head.frequencies, wanted.inv_freq)
    assert eagle3.expected_shapes(config).keys() == dict(head.state_dict()).keys()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (eagle3.Params(vocab_size=1000), "vocab_size must be 1 to 259"),
        (eagle3.Params(vocab_size=8, aux_layers=(2, 1)), "aux_layers must ascend within 0 to 2"),
        (eagle3.Params(vocab_size=8, aux_layers=(1, 7)), "aux_layers must ascend within 0 to 2"),
    ],
)
def test_a_shape_that_does_not_fit_the_target_is_refused(
    tiny_target: Path, params: eagle3.Params, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        eagle3.create(params, tiny_target, np.ones(259))


Weights = dict[str, Tensor]


def nan(weights: Weights) -> Weights:
    weights["fc.weight"][0, 0] = float("nan")
    return weights


def without_norm(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name != "norm.weight"}


def with_extra(weights: Weights) -> Weights:
    return {**weights, "surprise": torch.zeros(1)}


def narrow(weights: Weights) -> Weights:
    return {**weights, "norm.weight": weights["norm.weight"][:5].clone()}


def wide_dtype(weights: Weights) -> Weights:
    return {**weights, "norm.weight": weights["norm.weight"].double()}


def outside_vocabulary(weights: Weights) -> Weights:
    weights["d2t"][-1] = 10_000
    return weights


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (nan, "tensor fc.weight holds NaN"),
        (without_norm, "tensor norm.weight is missing"),
        (with_extra, "tensor surprise is not one of"),
        (narrow, r"tensor norm.weight is .*\[5\]; wanted .*\[128\]"),
        (wide_dtype, "tensor norm.weight is torch.float64"),
        (outside_vocabulary, "d2t must name ascending tokens of 0 to 258"),
    ],
)
def test_a_spoiled_draft_is_refused_by_the_name_of_what_is_wrong(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, spoil: Callable[[Weights], Weights], message: str
) -> None:
    shutil.copy(tiny_draft / "config.json", tmp_path)
    save_file(spoil(load_file(tiny_draft / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        eagle3.check(tmp_path, like=tiny_draft, target=describe(tiny_target))


def test_a_truncated_draft_is_refused(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_draft / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tiny_draft / "model.safetensors").read_bytes()[:2000])
    with pytest.raises(ValueError, match="not a safetensors file"):
        eagle3.check(tmp_path, like=None, target=describe(tiny_target))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"redraft": {"target_sha256": "0" * 64}}, "made for target_sha256 000000000000"),
        ({"redraft": {"tokenizer_sha256": "1" * 64}}, "made for tokenizer_sha256 111111111111"),
        ({"vocab_size": 7}, "vocab_size 7, the target has 259"),
        ({"architectures": ["MedusaModel"]}, "wanted LlamaForCausalLMEagle3"),
        ({"rms_norm_eps": 1.0}, "differs from the served draft in rms_norm_eps"),
    ],
)
def test_a_draft_for_something_else_is_refused(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    shutil.copy(tiny_draft / "model.safetensors", tmp_path)
    config = json.loads((tiny_draft / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        eagle3.check(tmp_path, like=tiny_draft, target=describe(tiny_target))
