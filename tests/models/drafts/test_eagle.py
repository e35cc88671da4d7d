from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.core.checkpoints.checkpoint import read_tensor
from models.drafts import eagle
from tests.models.drafts.tiny import library_layer, make_tiny, rows_at, save_tiny

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
    rows = rows_at(4, 8)
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[:, 1:10]]
    with torch.inference_mode():
        read = torch.cat([embedded, draft.combine(rows.hidden)], dim=-1) @ draft.fc.weight.T
        (drafted,) = draft.unroll(rows, 1)
        wanted = library_layer(draft, read[0], normed=False)[[4, 8]]
    torch.testing.assert_close(drafted.hidden, wanted, rtol=1e-4, atol=1e-4)


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


def test_what_vllm_serves_says_every_token_of_the_target(tiny_target: Path, tmp_path: Path) -> None:
    whole, part = (save_tiny(eagle, tiny_target, tmp_path / str(served), served=served) for served in (True, False))
    assert eagle.load(whole, tiny_target).vocabulary.tolist() == list(range(259))
    assert eagle.vllm_config(whole) == {"method": "eagle", "model": str(whole)}
    with pytest.raises(ValueError, match="every token of the target's 259, this one 64: set vocab_size = 0 in"):
        eagle.vllm_config(part)
