import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from models import catalog, quantize
from models.core.checkpoints import mixed
from models.core.checkpoints.invariants import require
from models.core.checkpoints.loading import load_model
from models.core.checkpoints.sparsity import Pattern
from models.prune import magnitude, prune_model
from models.stages import Quantize

DOCUMENTS = torch.randint(3, 259, (8, 48), generator=torch.Generator().manual_seed(0)).tolist()
DOWN = {"*.mlp.down_proj": {"name": "int8_dynamic"}, "model.layers.0.self_attn.*": "float"}


def stage(**table: object) -> Quantize:
    return Quantize.model_validate(table)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(torch.tensor(DOCUMENTS), use_cache=False).logits


def test_a_layer_is_stored_in_the_form_of_the_first_pattern_that_fits(model: PreTrainedModel, tmp_path: Path) -> None:
    table = stage(method={"name": "int8_static"}, exceptions=DOWN)
    made = mixed.quantize(model, DOCUMENTS, table.method, table.exceptions)
    quantize.save(made, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.self_attn.q_proj.input_scale" in tensors
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype == torch.int8
    assert "model.layers.1.mlp.down_proj.input_scale" not in tensors
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == torch.bfloat16
    assert made.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(logits(load_model(tmp_path)), logits(made.model))
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert scheme["ignore"][1:] == [f"model.layers.0.self_attn.{part}_proj" for part in "qkvo"]
    assert scheme["config_groups"]["group_1"]["targets"] == [f"model.layers.{n}.mlp.down_proj" for n in (0, 1)]


def test_four_and_eight_bits_stand_in_one_checkpoint_and_pruned_zeroes_stay(model: PreTrainedModel, tmp_path: Path):
    prune_model(model, [], magnitude.Params(), Pattern(kept=2, group=4))
    exceptions = {"*.down_proj": {"name": "rtn", "bits": 8, "group_size": 64}}
    table = stage(method={"name": "gptq", "group_size": 64}, exceptions=exceptions)
    made = mixed.quantize(model, DOCUMENTS, table.method, table.exceptions)
    quantize.save(made, tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(logits(loaded), logits(made.model))
    require(loaded)


@pytest.mark.parametrize(
    ("exceptions", "fault"),
    [
        ({"*.q_proj": "float"}, "takes self_attn.q_proj of self_attn.q_proj, self_attn.k_proj, self_attn.v_proj"),
        ({"*.down_proj": {"name": "nf4"}}, r'"nf4" can\'t stand beside "int8_static"; choose one that is stored as'),
        ({"*.down_proj": {"name": "int8_dynamc"}}, 'did you mean "int8_dynamic"'),
        ({"*.down_proj": "flaot"}, """wanted a method's table or "float" for each pattern; got 'flaot'"""),
        (["*.down_proj"], "wanted a table of patterns"),
    ],
)
def test_exceptions_that_can_not_be_served_are_refused_when_they_are_read(exceptions: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        stage(method={"name": "int8_static"}, exceptions=exceptions)


def test_a_pattern_without_a_layer_is_named(model: PreTrainedModel) -> None:
    table = stage(method={"name": "int8_dynamic"}, exceptions={"*.dwn_proj": "float"})
    with pytest.raises(ValueError, match=r'exception "\*\.dwn_proj" fits no linear layer'):
        mixed.quantize(model, DOCUMENTS, table.method, table.exceptions)


def test_exceptions_survive_json() -> None:
    table = stage(method={"name": "int8_static"}, exceptions=DOWN)
    assert Quantize.model_validate_json(table.model_dump_json()) == table
    assert table.exceptions["*.mlp.down_proj"] == catalog.parse("quantize", {"name": "int8_dynamic"})
