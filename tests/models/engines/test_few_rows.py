"""Products of few rows read a target's grid, those of more its floats, and both say the same."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from models.layers import grids
from models.layers.grids import Grid, stacked
from tests.models.layers.published import random_grid

ROWS = (1, 3, 4, 5, 8)


def form_of(grid: Grid):
    from vllm import _custom_ops as ops

    from models.engines.vllm import few_rows

    few_rows._define()
    weight = grid.floats().bfloat16()
    return few_rows.Form(grid, ops.create_onednn_mm(weight.t()), torch.bfloat16), grid.floats()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.mark.engine
@pytest.mark.parametrize("bits", [4, 8])
def test_either_form_gives_the_products_of_the_weights(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from models.engines.vllm import few_rows

    form, weight = form_of(random_grid(64, 128, bits))
    for num in ROWS:
        x = torch.randn(num, 128, dtype=torch.bfloat16)
        for limit in (0, num):
            monkeypatch.setattr(few_rows._target, "limit", limit)
            assert error(form.multiply(x), x.float() @ weight.T) < 0.01
    bias = torch.randn(64, dtype=torch.bfloat16)
    assert error(form.multiply(x[None], bias)[0], x.float() @ weight.T + bias) < 0.01


@pytest.mark.engine
def test_a_product_that_was_compiled_follows_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.engines.vllm import few_rows

    form, _ = form_of(random_grid(64, 128, 4))
    other, _ = form_of(random_grid(64, 128, 4, seed=1))
    form.packed, form.scales = other.packed, other.scales  # so that the forms can be told apart
    multiply = torch.compile(form.multiply, dynamic=True)
    x = torch.randn(4, 128, dtype=torch.bfloat16)
    outputs = []
    for limit in (0, 4, 3):
        monkeypatch.setattr(few_rows._target, "limit", limit)
        outputs.append(multiply(x))
        assert torch.equal(outputs[-1], form.multiply(x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def layer_of(prefix: str, weight: Tensor) -> nn.Module:
    layer = nn.Module()
    layer.prefix, layer.weight = prefix, nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.engine
def test_layers_whose_weights_the_grid_holds_have_both_forms(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from vllm.model_executor.layers import utils

    from models.engines.vllm import few_rows

    stem = "model.layers.0.self_attn"
    parts = {f"{stem}.{part}_proj.weight": random_grid(64, 128, 4, seed) for seed, part in enumerate("qkvo")}
    head = random_grid(512, 128, 8)
    grids.save({**parts, "model.embed_tokens.weight": head}, tmp_path)
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    monkeypatch.setattr("vllm.config.get_current_vllm_config", lambda: config)
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(few_rows, "_target", few_rows._Target())
    few_rows.install()
    qkv, out = stacked([parts[f"{stem}.{part}_proj.weight"] for part in "qkv"]), parts[f"{stem}.o_proj.weight"]
    trained = out.floats().bfloat16() * 2
    layers = {
        "model.embed_tokens": head.floats().bfloat16(),
        f"{stem}.qkv_proj": qkv.floats().bfloat16(),
        f"{stem}.o_proj": trained,  # as after finetuning
        "model.layers.1.self_attn.o_proj": out.floats().bfloat16(),
        "lm_head": head.floats().bfloat16(),
    }
    x = torch.randn(2, 128, dtype=torch.bfloat16)
    for prefix, weight in layers.items():
        layer = layer_of(prefix, weight.clone())
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=prefix != "lm_head")
        assert error(layer.cpu_linear(x, layer.weight, None), x.float() @ weight.float().T) < 0.01
    assert [form.product.n for form in few_rows._target.forms] == [192, 512]
    assert few_rows.limit() in (0, *few_rows.ROWS)  # measured, on tiny layers
    few_rows._load.cache_clear()
