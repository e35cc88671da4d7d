"""Products of few rows read a target's grid, those of more its floats, and both say the same."""

import logging
import platform
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import utils
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from models.core.layers import quantized_weights
from models.core.layers.quantized_weights import Grid, stacked
from models.engines.vllm import native_build
from models.engines.vllm.patches import small_batch_gemm
from tests.models.core.layers.published import random_grid

pytestmark = pytest.mark.engine

ROWS = (1, 3, 12, 19, 200)  # one, some, a block's, two blocks', and more than are multiplied by what was unpacked once
# What processors without AVX-512 have.
PLAIN = ("-std=c++20", "-O3", "-march=x86-64-v3", "-fPIC", "-Wno-psabi")


def form_of(grid: Grid, dtype: torch.dtype = torch.bfloat16, in_step: bool = False, of_draft: bool = False):
    assert small_batch_gemm._is_built()
    product = ops.create_onednn_mm(grid.floats().to(dtype).t())
    return small_batch_gemm.Form(grid, product, dtype, in_step, of_draft), grid.floats()


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got.float() - wanted).norm() / wanted.norm())


@pytest.fixture
def limit():
    """Sets up to how many rows the grid is read."""
    before = small_batch_gemm.limit()
    yield small_batch_gemm._target._set
    small_batch_gemm._target._set(before)


@pytest.mark.parametrize("num_outputs", [64, 72])  # whole panels, and one that is not full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [4, 8])
def test_either_form_gives_the_products_of_the_weights(bits: int, dtype: torch.dtype, num_outputs: int, limit) -> None:
    form, weight = form_of(random_grid(num_outputs, 128, bits), dtype)
    most_error = 0.004 if dtype == torch.bfloat16 else 1e-6
    for num in ROWS:
        x = torch.randn(num, 128, dtype=dtype)
        for most in (0, num):
            limit(most)
            assert error(form.multiply(x), x.float() @ weight.T) < most_error
    bias = torch.randn(num_outputs, dtype=dtype)
    assert error(form.multiply(x[None], bias)[0], x.float() @ weight.T + bias) < most_error


@pytest.mark.parametrize(("bits", "of_draft"), [(4, False), (8, False), (8, True)])
def test_a_row_is_the_same_beside_others(bits: int, of_draft: bool, limit) -> None:
    form, _ = form_of(random_grid(64, 128, bits), of_draft=of_draft)
    limit(max(ROWS))
    require_same_bits(form, None)


def require_same_bits(form: small_batch_gemm.Form, bias: Tensor | None) -> None:
    """Fail where a row has other bits with more or fewer beside it, or in another place."""
    x = torch.randn(max(ROWS), form.num_inputs, dtype=torch.bfloat16)
    together = form.multiply(x, bias)
    for num in range(1, len(x)):
        first = num % (len(x) - num)
        assert torch.equal(form.multiply(x[first : first + num], bias), together[first : first + num])


@pytest.fixture
def all_rows(monkeypatch: pytest.MonkeyPatch, limit):
    """The target's products are of the packed weights in any step, as in a batch-invariant engine."""
    monkeypatch.setenv(native_build.INVARIANT, "1")
    assert small_batch_gemm._is_built()
    limit(0)
    torch.ops.redraft.multiply_all_rows(True)
    yield
    torch.ops.redraft.multiply_all_rows(False)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs", [96, 72])
@pytest.mark.parametrize(("bits", "num_inputs"), [(4, 576), (8, 576), (16, 576), (4, 1536), (16, 1536)])
def test_all_rows_of_a_batch_invariant_target_have_the_packed_product(
    bits: int, num_inputs: int, num_outputs: int, has_bias: bool, all_rows
) -> None:
    if bits == 16 and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("a processor without AVX512_BF16 has no product of bfloat16")
    bias = torch.randn(num_outputs, dtype=torch.bfloat16) if has_bias else None
    if bits == 16:
        weight = torch.randn(num_outputs, num_inputs).bfloat16()
        layer = layer_of("model.layers.0.mlp.down_proj", weight.clone())
        form = small_batch_gemm.Form(layer.weight, small_batch_gemm.NoProduct(num_outputs), weight.dtype)
    else:
        form, weight = form_of(random_grid(num_outputs, num_inputs, bits), in_step=True)
    x = torch.randn(max(ROWS), num_inputs, dtype=torch.bfloat16)
    torch.ops.redraft.tell_step_of_few_rows(len(x), True)  # a prompt's
    wanted = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    assert error(form.multiply(x, bias), wanted) < 0.005
    require_same_bits(form, bias)


def test_a_batch_invariant_draft_keeps_its_limit(all_rows) -> None:
    form, _ = form_of(random_grid(64, 128, 8), of_draft=True)
    form.packed.zero_()
    assert form.multiply(torch.randn(4, 128, dtype=torch.bfloat16)).any()  # it read floats


def test_a_drafts_products_are_those_of_its_weights_whatever_its_inputs_sizes(limit) -> None:
    form, weight = form_of(random_grid(72, 128, 8), of_draft=True)
    x = torch.randn(max(ROWS), 128).bfloat16() * torch.logspace(-6, 6, max(ROWS))[:, None].bfloat16()
    x[1] = 0
    limit(len(x))
    for num in ROWS:
        got, wanted = form.multiply(x[:num]), x[:num].float() @ weight.T
        assert all(error(got[row], wanted[row]) < 0.004 for row in range(num) if row != 1)
        assert not got[1:2].any()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_that_reads_a_prompt_has_the_product_of_floats_however_few_rows_it_has(compiled: bool, limit) -> None:
    form, _ = form_of(random_grid(64, 128, 4), in_step=True)
    other, _ = form_of(random_grid(64, 128, 4, seed=1))
    form.packed, form.scales = other.packed, other.scales  # so that the kernels can be told apart
    multiply = torch.compile(form.multiply, dynamic=True) if compiled else form.multiply
    tell, x = torch.ops.redraft.tell_step_of_few_rows, torch.randn(4, 128, dtype=torch.bfloat16)
    limit(0)
    of_floats = multiply(x)
    limit(4)
    tell(4, False)
    of_grid = multiply(x)
    assert not torch.equal(of_grid, of_floats)
    tell(4, True)
    assert torch.equal(multiply(x), of_floats)
    assert torch.equal(multiply(x[:3]), of_grid[:3])  # not that step's
    form.in_step = False  # what is sampled, and what a draft computes
    assert torch.equal(form.multiply(x), of_grid)
    limit(3)
    assert torch.equal(multiply(x), of_floats) and torch.equal(form.multiply(x), of_floats)


@pytest.mark.parametrize(("grid_s", "faster", "most"), [(2.0, 0, 9), (0.5, 32, 32)])
def test_as_many_rows_as_one_sequence_has_verified_read_the_grid_however_long_that_takes(
    grid_s: float, faster: int, most: int, limit, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    target = small_batch_gemm._Target()
    monkeypatch.setattr(target, "_seconds", lambda rows, limit: grid_s if limit else 1.0)
    target.measure(9)
    assert (target.faster, target.limit) == (faster, most)
    assert f"up to {most} rows of generated tokens read the grid" in caplog.text


def test_outputs_are_rounded_as_torch_does_ties_and_what_is_no_number_included(limit) -> None:
    weights = torch.zeros(72, 32, dtype=torch.int8)
    weights[:, 0], weights[:, 1] = 1, torch.arange(72) - 36
    form, _ = form_of(Grid(weights, torch.ones(72, 1).half()))
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[:2, 0], x[:2, 1] = 1, torch.tensor([2**-8, 2**-9])  # bfloat16's neighbours of 1 are 2^-8 below and 2^-7 above
    x[2, 0] = torch.nan
    limit(len(x))
    outputs = form.multiply(x)
    assert torch.equal(outputs[:2], (x[:2].float() @ weights.float().T).bfloat16())
    assert outputs[2].isnan().all()


def test_without_avx512_products_are_of_floats(tmp_path: Path) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("another processor has no other products than those of floats")
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        errors = process.submit(plain_errors, tmp_path).result()
    assert max(errors) < 1e-6


def plain_errors(folder: Path) -> list[float]:
    """Return the errors of products in float32 by the code that knows no processor; in a process of its own."""
    native_build.load(native_build.FEW_ROWS, folder, PLAIN)
    torch.ops.redraft.limit_few_rows(max(ROWS))
    errors = []
    for grid in (random_grid(72, 128, 4), random_grid(72, 128, 8)):
        product = SimpleNamespace(handler_tensor=torch.zeros(1), n=72)
        form = small_batch_gemm.Form(grid, product, torch.float32)
        x = torch.randn(max(ROWS), 128)
        errors += [error(form.multiply(x[:num]), x[:num] @ grid.floats().T) for num in ROWS]
    return errors


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patch, with no layer of another test."""
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(small_batch_gemm, "_target", small_batch_gemm._Target())
    small_batch_gemm.install()
    assert small_batch_gemm._is_built()


def layer_of(prefix: str, weight: Tensor) -> nn.Module:
    layer = nn.Module()
    layer.prefix, layer.weight = prefix, nn.Parameter(weight, requires_grad=False)
    return layer


def test_layers_whose_weights_the_grid_holds_have_both_forms(installed, monkeypatch, tmp_path, limit) -> None:
    stem = "model.layers.0.self_attn"
    parts = {f"{stem}.{part}_proj.weight": random_grid(64, 128, 4, seed) for seed, part in enumerate("qkvo")}
    head = random_grid(512, 128, 8)
    quantized_weights.save({**parts, "model.embed_tokens.weight": head}, tmp_path)
    drafting = SimpleNamespace(num_speculative_tokens=8)
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)), speculative_config=drafting)
    monkeypatch.setattr(small_batch_gemm, "get_current_vllm_config", lambda: config)
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
    assert [form.product.n for form in small_batch_gemm._target.forms] == [192, 512]
    assert [form.in_step for form in small_batch_gemm._target.forms] == [True, False]
    assert small_batch_gemm.limit() in {max(9, rows) for rows in small_batch_gemm.ROWS}  # measured, on tiny layers
    small_batch_gemm._load.cache_clear()


@pytest.mark.parametrize(("dtype", "num_inputs", "packed"), [(torch.bfloat16, 128, True), (torch.bfloat16, 72, False)])
def test_layers_without_a_grid_are_packed_in_bfloat16_where_all_rows_are_to_be_alike(
    dtype: torch.dtype, num_inputs: int, packed: bool, installed, all_rows, monkeypatch, tmp_path
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)), speculative_config=None)
    monkeypatch.setattr(small_batch_gemm, "get_current_vllm_config", lambda: config)
    weight, x = torch.randn(64, num_inputs).to(dtype), torch.randn(40, num_inputs).to(dtype)
    layer = layer_of("model.layers.0.self_attn.o_proj", weight.clone())
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert hasattr(layer, small_batch_gemm.FORM) is packed
    assert error(layer.cpu_linear(x, layer.weight, None), x.float() @ weight.float().T) < 0.005
    assert small_batch_gemm._target.forms == []
    small_batch_gemm._load.cache_clear()


@pytest.mark.parametrize(
    ("name", "most", "dtype", "num_inputs", "packed"),
    [
        ("lm_head", 4, torch.bfloat16, 128, True),
        ("lm_head", 0, torch.bfloat16, 128, False),  # the target's floats are read faster
        ("lm_head", 4, torch.float32, 128, False),
        ("lm_head", 4, torch.bfloat16, 72, False),  # no whole groups
        ("model.embed_tokens", 4, torch.bfloat16, 128, False),
    ],
)
def test_few_rows_read_8_bits_of_a_draft_beside_a_target_with_a_grid(
    name: str, most: int, dtype: torch.dtype, num_inputs: int, packed: bool, installed, limit
) -> None:
    small_batch_gemm._target._set(most)
    small_batch_gemm._target.faster = most
    x = torch.randn(6, num_inputs).to(dtype)
    for seed in range(2):  # the second is swapped in
        weight = torch.randn(64, num_inputs, generator=torch.Generator().manual_seed(seed)).to(dtype)
        layer = layer_of(name, weight.clone())
        with small_batch_gemm.loading_draft():
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        wanted = x.float() @ weight.float().T
        few, many = (error(layer.cpu_linear(x[:num], layer.weight, None), wanted[:num]) for num in (4, 6))
        assert few < 0.01
        assert many < 0.003
        assert (few > many + 0.002) is packed
        assert (layer.__dict__.get(small_batch_gemm.FORM) is not None) is packed
        assert not packed or getattr(layer, small_batch_gemm.FORM).of_draft
    assert small_batch_gemm._target.forms == []  # by which the limit is measured
    assert small_batch_gemm.limit() == most


def test_what_vllm_loads_as_a_draft_is_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    small_batch_gemm.install()
    seen = []

    class Drafter(SpecDecodeBaseProposer):
        def __init__(self) -> None:
            pass

        def _get_model(self) -> nn.Module:
            seen.append(small_batch_gemm._target.loads_draft)
            raise ValueError("torn")

    drafter = Drafter()
    drafter.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={}))
    with pytest.raises(ValueError, match="torn"):
        drafter.load_model(nn.Module())
    assert seen == [True]
    assert not small_batch_gemm._target.loads_draft


@pytest.mark.usefixtures("no_compiler")
def test_where_nothing_can_be_compiled_floats_are_read(caplog: pytest.LogCaptureFixture) -> None:
    assert not small_batch_gemm._is_built()
    assert "no-compiler" in caplog.text
