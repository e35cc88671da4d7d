"""The EAGLE-3 head: what it starts from, and what becomes of its vocabulary and its positions."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from models.core.checkpoints.checkpoint import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.drafts import eagle3

HIDDEN, WIDTH = 128, 64
TINY = {"vocab_size": 64}


def test_a_new_head_starts_from_the_targets_last_layer(tiny_target: Path) -> None:
    head = eagle3.create(eagle3.Params(vocab_size=10), tiny_target, np.arange(259))
    assert head.vocabulary.tolist() == list(range(249, 259))
    last = read_tensor(tiny_target, "model.layers.1.mlp.up_proj.weight").float()
    torch.testing.assert_close(head.midlayer["mlp"]["up_proj"].weight.detach(), last)
    assert head.midlayer["self_attn"]["q_proj"].weight[:, :HIDDEN].abs().max() == 0


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
    plain, head = eagle3.Eagle3(json.loads((tiny_draft / "config.json").read_text())), eagle3.Eagle3(config)
    assert not torch.equal(head.frequencies, plain.frequencies)
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
