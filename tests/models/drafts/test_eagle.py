import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from models.checkpoints.checkpoint import output_embedding, read_tensor
from models.drafts import Rows, eagle
from models.losses import feature_regression
from models.targets import describe
from tests.models.drafts.tiny import make_tiny, save_tiny

TINY = {"vocab_size": 64}
SERVED = {"vocab_size": 0}


def test_a_feature_is_what_the_targets_output_matrix_reads(tiny_target: Path) -> None:
    draft = eagle.create(eagle.Params(vocab_size=259), tiny_target, np.ones(259))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    with torch.inference_mode():
        wanted = model(torch.arange(3, 20)[None]).logits
        _, said = draft.say(draft.combine(kept[0]))
    torch.testing.assert_close(said, wanted, rtol=1e-4, atol=1e-4)


def test_the_first_step_is_the_librarys_layer_without_its_first_norm(tiny_target: Path) -> None:
    draft = make_tiny(eagle, tiny_target)
    rng = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(1, 9, 128, generator=rng), torch.randint(0, 259, (1, 11), generator=rng)
    config = LlamaConfig(**draft.config, attn_implementation="eager")
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    layer.load_state_dict(draft.layers[0].state_dict())
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[tokens[:, 1:10]]
    with torch.inference_mode():
        read = torch.cat([embedded, draft.combine(hidden)], dim=-1) @ draft.fc.weight.T
        positions = torch.arange(9)[None]
        waves = LlamaRotaryEmbedding(config)(read, positions)
        mask = torch.full((9, 9), float("-inf")).triu(1)[None, None]
        wanted = layer(read, attention_mask=mask, position_ids=positions, position_embeddings=waves)
        rows = Rows(hidden, tokens, torch.tensor([0, 0]), torch.tensor([4, 8]))
        (drafted,) = draft.unroll(rows, 1)
    torch.testing.assert_close(drafted.hidden, wanted[0, [4, 8]], rtol=1e-4, atol=1e-4)


def test_training_reads_features_that_are_off_by_no_more_than_the_noise(tiny_target: Path) -> None:
    draft = eagle.create(eagle.Params(noise=0.25, **TINY), tiny_target, np.ones(259))
    hidden, tokens = torch.randn(1, 300, 128), torch.full((1, 300), 5)
    with torch.inference_mode():
        plain, noisy, again = (
            draft.context(hidden, tokens, rng=rng)[0]
            for rng in (None, torch.Generator().manual_seed(1), torch.Generator().manual_seed(1))
        )
    assert torch.equal(noisy, again)
    assert 0.24 < float((noisy - plain).abs().max()) <= 0.25 + 1e-5
    assert float((noisy - plain).mean()) == pytest.approx(0, abs=0.005)


def test_one_step_is_trained_by_regression(tiny_target: Path) -> None:
    draft = make_tiny(eagle, tiny_target)
    assert draft.procedure == (feature_regression.Params(classification=0.1), "all", 1.0)
    assert draft.num_unrolled(5) == 1


def test_the_vocabulary_follows_the_traffic_and_changes_nothing_else(tiny_target: Path) -> None:
    draft = make_tiny(eagle, tiny_target)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items() if name != "token_map"}
    counts = np.zeros(259)
    counts[100:164] = 1
    after = eagle.renew(draft, tiny_target, counts)
    assert after.vocabulary.tolist() == list(range(100, 164))
    assert torch.equal(after.output.weight, output_embedding(tiny_target)[100:164])
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.items())


def test_a_vocabulary_outside_of_the_targets_is_refused(tiny_target: Path, tmp_path: Path) -> None:
    draft = make_tiny(eagle, tiny_target)
    draft.token_map[-1] = 259
    eagle.save(draft, tmp_path)
    with pytest.raises(ValueError, match="token_map must name ascending tokens of 0 to 258; got 3 to 259"):
        eagle.check(tmp_path, None, describe(tiny_target))
    with pytest.raises(ValueError, match="draft vocab_size must be 1 to 259, the target's; got 4096"):
        eagle.create(eagle.Params(), tiny_target, np.ones(259))


def test_a_draft_without_the_targets_states_is_an_error_that_says_so(tiny_target: Path) -> None:
    rows = Rows(torch.empty(1, 9, 0), torch.full((1, 20), 5), torch.tensor([0]), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"reads the target's last hidden state, 128 wide; got states of width 0"):
        make_tiny(eagle, tiny_target).unroll(rows, 1)


def test_a_target_of_another_layout_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="eagle reads targets of the Llama layout; got model_type 'gpt2'"):
        eagle.create(eagle.Params(), tmp_path, np.empty(0))


def test_what_vllm_serves_says_every_token_of_the_target(tiny_target: Path, tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    for directory, served in ((whole, True), (part, False)):
        directory.mkdir()
        save_tiny(eagle, tiny_target, directory, served=served)
    assert eagle.load(whole, tiny_target).vocabulary.tolist() == list(range(259))
    assert eagle.vllm_config(whole) == {"method": "eagle", "model": str(whole)}
    with pytest.raises(ValueError, match="every token of the target's 259, this one 64: set vocab_size = 0 in"):
        eagle.vllm_config(part)
