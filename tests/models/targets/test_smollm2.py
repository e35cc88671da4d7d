import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from models.core.layers import quantized_weights
from models.targets import smollm2


@pytest.mark.slow
def test_the_files_own_integers_stand_for_every_matrix_and_the_tokenizer_can_chat(tmp_path) -> None:
    smollm2.build(smollm2.Params(name="smollm2"), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    found = quantized_weights.load(tmp_path)
    assert found.keys() == {name for name, weight in weights.items() if weight.ndim == 2}
    assert all(grid.holds(weights[name]) for name, grid in found.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id is not None
