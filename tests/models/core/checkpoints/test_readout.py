from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from models.core.checkpoints.readout import Readout, decoder_layers, input_embedding, last_norm, output_embedding
from tests.models.families import CAUSAL, write_family

IDS = torch.tensor([[5, 9, 14, 30]])


@pytest.mark.parametrize("model_type", CAUSAL)
def test_the_last_residual_stream_read_out_gives_the_models_logits(model_type: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_family(model_type, tmp_path), dtype=torch.float32)
    kept: list[torch.Tensor] = []
    decoder_layers(model)[-1].register_forward_hook(
        lambda _, __, output: kept.append(output[0] if isinstance(output, tuple) else output)
    )
    rows = torch.tensor([3, 77, 200])
    with torch.inference_mode():
        wanted = model(IDS).logits[0]
        whole, some, own = Readout.load(tmp_path), Readout.load(tmp_path, rows=rows), Readout(model)
        for readout, logits in ((whole, wanted), (some, wanted[:, rows]), (own, wanted)):
            torch.testing.assert_close(readout.logits(readout.norm(kept[0][0])), logits, rtol=1e-4, atol=1e-6)
        assert torch.equal(model(IDS).logits[0], wanted)
    assert torch.equal(input_embedding(tmp_path), model.get_input_embeddings().weight)
    assert torch.equal(output_embedding(tmp_path), model.get_output_embeddings().weight)


@pytest.mark.parametrize(("model_type", "added"), [("llama", 0.0), ("gpt2", 0.0), ("gemma", 1.0)])
def test_the_gain_of_the_last_norm_is_what_it_multiplies_by(model_type: str, added: float, tmp_path: Path) -> None:
    readout = Readout.load(write_family(model_type, tmp_path))
    weight = torch.linspace(0.5, 1.5, 128)
    readout.norm.load_state_dict(dict.fromkeys(readout.norm.state_dict(), weight))
    torch.testing.assert_close(readout.gain, weight + added, rtol=1e-4, atol=1e-4)


def test_a_model_without_the_parts_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_family("llama", tmp_path))
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="LlamaForCausalLM has no list of 3 decoder layers"):
        decoder_layers(model)
    model.model.norm = nn.Identity()
    with pytest.raises(ValueError, match="LlamaForCausalLM has no norm after its decoder layers"):
        last_norm(model)
