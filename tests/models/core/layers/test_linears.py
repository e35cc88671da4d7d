from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from models.core.layers.linears import Gram, Rows, calibrate, inverse_factor, linears, replace

DOCUMENTS = [[5, 9, 30, 41], [7, 8, 9]]
SECOND = "model.layers.1.self_attn.q_proj"


def read_by(model: PreTrainedModel, kind: type) -> dict[str, Any]:
    """Return what each layer reads of the documents."""
    seen: dict[str, Any] = {}
    calibrate(model, DOCUMENTS, kind, lambda name, layer, read: seen.update({name: read}))
    return seen


def test_every_matrix_of_a_block_is_walked_over_and_no_other(model: PreTrainedModel) -> None:
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    names = [name for name, _ in linears(model)]
    assert [name.rpartition(".")[2] for name in names] == 2 * list(parts)
    replace(model, lambda name, layer: nn.Linear(layer.in_features, layer.out_features, bias=False))
    assert [name for name, _ in linears(model)] == names


def test_a_layer_that_is_no_linear_one_is_named(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.up_proj = nn.Bilinear(2, 2, 2)
    with pytest.raises(ValueError, match=r"layer model\.layers\.1\.mlp\.up_proj is a Bilinear"):
        list(linears(model))


def test_a_layer_is_visited_with_what_it_reads_of_each_token(model: PreTrainedModel) -> None:
    seen = read_by(model, Rows)
    assert seen.keys() == {name for name, _ in linears(model)}
    ids = torch.tensor([*DOCUMENTS[0], *DOCUMENTS[1]])
    normed = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    assert torch.allclose(seen["model.layers.0.self_attn.q_proj"].inputs, normed)


def test_a_block_reads_what_the_changed_blocks_before_it_put_out(model: PreTrainedModel) -> None:
    def zero_first(name: str, layer: nn.Linear, read: Rows) -> None:
        changed.update({name: read.inputs})
        if name.startswith("model.layers.0."):
            layer.weight.zero_()

    before, changed = read_by(model, Rows), {}
    calibrate(model, DOCUMENTS, Rows, zero_first)
    assert not torch.allclose(before[SECOND].inputs, changed[SECOND])
    assert torch.allclose(changed[SECOND], read_by(model, Rows)[SECOND].inputs)


def test_what_can_not_be_calibrated_on_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="calibration takes documents of at least one token; got 0"):
        calibrate(model, [], Rows, lambda name, layer, read: None)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="attend in one way; this model's are full_attention, sliding_attention"):
        calibrate(model, DOCUMENTS, Rows, lambda name, layer, read: None)


def test_inner_products_are_summed_over_documents_and_shared_by_layers_that_read_alike(
    model: PreTrainedModel,
) -> None:
    rows, grams = read_by(model, Rows), read_by(model, Gram)
    for name, gram in grams.items():
        assert gram.num_tokens == 7
        torch.testing.assert_close(gram.matrix, rows[name].inputs.T @ rows[name].inputs)
    assert len({id(gram) for gram in grams.values()}) == 8  # of fourteen layers


def test_the_factor_squared_is_the_inverse_of_the_dampened_hessian() -> None:
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hessian = inputs.T @ inputs
    factor = inverse_factor(hessian, 0.01)
    assert torch.equal(factor, factor.triu())
    dampened = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    assert torch.allclose(factor.T @ factor @ dampened, torch.eye(6, dtype=torch.float64), atol=1e-10)


def test_a_feature_that_was_never_seen_is_left_by_itself() -> None:
    inputs = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    inputs[:, 2] = 0
    factor = inverse_factor(inputs.T @ inputs, 0.01)
    assert torch.isfinite(factor).all()
    assert not factor[2, 3] and not factor[:2, 2].any()
