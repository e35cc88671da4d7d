import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.core.checkpoints.loading import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.core.evaluation.scoring import score
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import Rows, eagle3, parallel_eagle
from models.targets import describe
from tests.models.drafts.answered import answers_of, prompts
from tests.models.families import CAUSAL, write_family
from tests.models.published import Change, like_eagle31, like_qwen3, published

HIDDEN = 128
K = 2
SAMPLES = [Sample(str(i), "d", [5, 6, 7 + i], [40 + i, 9, 10, 11, 12, 13, 14, 15], i % 2 / 2) for i in range(8)]


def test_a_new_head_starts_from_the_targets_last_layer(tiny_target: Path) -> None:
    head = eagle3.create(eagle3.Params(vocab_size=10), tiny_target, np.arange(259))
    assert head.vocabulary.tolist() == list(range(249, 259))
    last = read_tensor(tiny_target, "model.layers.1.mlp.up_proj.weight").float()
    torch.testing.assert_close(head.midlayer["mlp"]["up_proj"].weight.detach(), last)
    assert head.midlayer["self_attn"]["q_proj"].weight[:, :HIDDEN].abs().max() == 0


def test_renewing_the_vocabulary_keeps_learned_rows_and_takes_new_ones_from_the_target(tiny_target, tiny_draft) -> None:
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
    plain, head = eagle3.Eagle3(json.loads((tiny_draft / "config.json").read_text())), eagle3.Eagle3(config)
    assert not torch.equal(head.frequencies, plain.frequencies)
    torch.testing.assert_close(head.frequencies, wanted.inv_freq)
    assert eagle3.expected_shapes(config).keys() == dict(head.state_dict()).keys()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (eagle3.Params(vocab_size=8, aux_layers=(2, 1)), "aux_layers must ascend within 0 to 2"),
        (eagle3.Params(vocab_size=8, aux_layers=(1, 7)), "aux_layers must ascend within 0 to 2"),
    ],
)
def test_a_shape_that_does_not_fit_the_target_is_refused(tiny_target, params, message) -> None:
    with pytest.raises(ValueError, match=message):
        eagle3.create(params, tiny_target, np.ones(259))


def by_hand(head: eagle3.Eagle3, hidden: Tensor, token_ids: Sequence[int]) -> list[Tensor]:
    """Draft two tokens after a text as vLLM's modules do; `hidden` [T, A·H], `token_ids` of it and T + 1 more."""
    config, weights, eps = head.config, head.state_dict(), head.config["rms_norm_eps"]

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], eps)

    def product(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def attention_heads(joined: Tensor, name: str, positions: Tensor) -> Tensor:
        heads = product(joined, f"midlayer.self_attn.{name}_proj").unflatten(-1, (-1, config["head_dim"]))
        if f"midlayer.self_attn.{name}_norm.weight" in weights:
            heads = normed(heads, f"midlayer.self_attn.{name}_norm")
        return heads if name == "v" else head.rotated(heads.flatten(1).clone(), heads.shape[1], positions)

    if config.get("norm_before_fc"):
        hidden = normed(hidden, "input_norm")
    if config.get("fc_norm"):
        states = hidden.chunk(len(head.taps), dim=-1)
        hidden = torch.cat([normed(state, f"fc_norm.{number}") for number, state in enumerate(states)], dim=-1)
    state, length = product(hidden, "fc"), len(hidden)
    tokens, positions = torch.tensor(token_ids[1 : length + 1]), torch.arange(length)
    keys = values = torch.empty(0, config["num_key_value_heads"], config["head_dim"])
    found = []
    for step in range(2):
        read = normed(state, "midlayer.hidden_norm")
        joined = torch.cat([normed(head.embedding[tokens], "midlayer.input_layernorm"), read], dim=-1)
        queries, new_keys, new_values = (attention_heads(joined, name, positions) for name in "qkv")
        keys, values = torch.cat([keys, new_keys]), torch.cat([values, new_values])
        seen = torch.arange(len(keys)) <= positions[:, None]
        one = (heads.transpose(0, 1)[None] for heads in (queries, keys, values))
        attended = scaled_dot_product_attention(*one, seen, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        residual = read if config.get("norm_before_residual") else state
        residual = residual + product(attended, "midlayer.self_attn.o_proj")
        x = normed(residual, "midlayer.post_attention_layernorm")
        gate, up = (product(x, f"midlayer.mlp.{name}_proj") for name in ("gate", "up"))
        state = residual + product(silu(gate) * up, "midlayer.mlp.down_proj")
        said = normed(state, "norm")
        found.append(product(said[-1], "lm_head"))
        state = said[-1:] if config.get("norm_output") else state[-1:]
        place = length + step
        tokens, positions = torch.tensor(token_ids[place + 1 : place + 2]), torch.tensor([place])
    return found


def like_llama_with_biases(config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    config["attention_bias"] = True
    for name in "qkvo":
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = 0.3 * torch.randn(
            len(tensors[f"midlayer.self_attn.{name}_proj.weight"])
        )


@pytest.mark.parametrize("change", [lambda *head: None, like_eagle31, like_qwen3, like_llama_with_biases])
def test_a_published_head_drafts_by_the_formulas_of_the_engines_module(
    tiny_draft: Path, tiny_target: Path, tmp_path: Path, change: Change
) -> None:
    head = eagle3.adopt(published(tiny_draft, tiny_target, tmp_path / "head", "native", change), tiny_target)
    rng = torch.Generator().manual_seed(0)
    hidden, token_ids = torch.randn(6, head.fc.in_features, generator=rng), [*range(40, 49)]
    with torch.no_grad():
        rows = Rows(hidden[None], torch.tensor([token_ids]), torch.tensor([0]), torch.tensor([5]))
        steps = head.unroll(rows, 2)
        for step, wanted in zip(steps, by_hand(head, hidden, token_ids), strict=True):
            torch.testing.assert_close(step.logits[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [like_eagle31, like_qwen3])
def test_a_refresh_trains_all_that_a_published_head_has_but_its_output_matrix(
    tiny_draft: Path, tiny_target: Path, tmp_path: Path, change: Change
) -> None:
    head = eagle3.adopt(published(tiny_draft, tiny_target, tmp_path / "head", "native", change), tiny_target)
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    params = distill.Params(num_epochs=2, batch_tokens=256, num_threads=1)
    distill.train(head, tiny_target, answers_of(tiny_target, prompts(4)), params, 2, tmp_path / "work")
    same = [name for name, weight in head.named_parameters() if torch.equal(weight, before[name])]
    assert same == ["lm_head.weight"]
    (tmp_path / "refreshed").mkdir()
    eagle3.save(head, tmp_path / "refreshed")
    again = dict(eagle3.load(tmp_path / "refreshed", tiny_target).named_parameters())
    assert all(torch.equal(again[name], weight.bfloat16().float()) for name, weight in head.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_head_for_a_target_of_any_layout_learns_what_the_target_says(model_type: str, tmp_path: Path) -> None:
    target = write_family(model_type, tmp_path / "target")
    counts = np.bincount([token for one in SAMPLES for token in one.completion_ids], minlength=259)
    draft = eagle3.create(eagle3.Params(vocab_size=64), target, counts)
    report = distill.train(draft, target, SAMPLES, distill.Params(num_epochs=6), K, tmp_path / "work")
    assert report.losses[-1][1] < report.losses[0][1]
    (tmp_path / "draft").mkdir()
    eagle3.save(draft, tmp_path / "draft")
    eagle3.check(tmp_path / "draft", None, describe(target))
    again = eagle3.load(tmp_path / "draft", target)
    scores = score(again, target, SAMPLES, K, tmp_path / "work")
    assert all(one.accepted > 0 for one in scores if int(one.id) % 2)  # those that were sampled


def test_a_head_that_drafts_in_one_pass_is_made_for_another_layout_too(tmp_path: Path) -> None:
    target = write_family("phi", tmp_path / "target")
    draft = parallel_eagle.create(parallel_eagle.Params(vocab_size=64), target, np.ones(259, int))
    assert len(score(draft, target, SAMPLES, K, tmp_path / "work")) == len(SAMPLES)


def test_the_head_says_tokens_at_the_scale_of_its_target(tmp_path: Path) -> None:
    target = write_family("granite", tmp_path)
    head = eagle3.create(eagle3.Params(vocab_size=64), target, np.ones(259, int))
    torch.testing.assert_close(head.lm_head.weight.detach(), output_embedding(target)[head.vocabulary] / 8)
