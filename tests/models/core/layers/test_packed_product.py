import pytest
import torch
from torch import nn
from torch.nn import functional

from models.core.layers import kernels
from models.core.layers.kernels import Borrowed, fits_half, pack, takes_int8, takes_onednn

ROWS = (1, 4, 40)
needs_int8 = pytest.mark.skipif(not takes_int8(torch.zeros(32, 32)), reason="no int8 products here")


def matrix() -> torch.Tensor:
    """[64, 64] with columns from below float16's smallest step to its largest value."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(64, 64, generator=rng) * torch.logspace(-9, 4, 64)


def test_only_weights_that_float16_holds_are_read_as_float16() -> None:
    assert fits_half(matrix().bfloat16().float())
    assert not fits_half(matrix())
    assert not fits_half((10 * matrix()).bfloat16().float())
    assert not fits_half(matrix().bfloat16())


def planted(num_rows: int, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return rows, a bias, their exact product with a matrix, and the sum of its terms' sizes."""
    rng = torch.Generator().manual_seed(1)
    x, bias = torch.randn(num_rows, 64, generator=rng).to(dtype), torch.randn(64, generator=rng).to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    return x, bias, exact, x.abs().double() @ weight.abs().double().T + bias.abs().double()


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_product_in_half_is_exact_to_the_rounding_of_its_smallest_weights(num_rows: int) -> None:
    weight = matrix().bfloat16().float()
    x, bias, exact, size = planted(num_rows, weight, torch.float32)
    allowed = kernels.HALF_STEP * x.abs().double().sum(1, keepdim=True) + 1e-6 * size
    assert bool(((kernels.half_product(weight)(x, bias).double() - exact).abs() <= allowed + 1e-6).all())


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_matrix_that_float16_does_not_hold_keeps_its_values(num_rows: int) -> None:
    x, bias, exact, size = planted(num_rows, matrix(), torch.float32)
    assert bool(((kernels.product(matrix())(x, bias).double() - exact).abs() <= 1e-6 * size).all())


@pytest.mark.skipif(not takes_onednn(torch.zeros(1, 1, dtype=torch.bfloat16)), reason="no bfloat16 products here")
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_packed_matrix_in_bfloat16_gives_the_rounded_product(num_rows: int) -> None:
    weight = matrix().bfloat16()
    x, bias, exact, size = planted(num_rows, weight, torch.bfloat16)
    allowed = 2.0**-8 * exact.abs() + 1e-6 * size
    assert bool(((kernels.onednn_product(weight)(x, bias).double() - exact).abs() <= allowed).all())


def test_onednn_packs_matrices_of_a_processor_in_float32_or_bfloat16_alone_and_int8_whole_blocks() -> None:
    assert takes_onednn(torch.zeros(1, 1)) == torch.backends.mkldnn.is_available()
    assert not takes_onednn(torch.zeros(1, 1, dtype=torch.float64))
    assert not takes_onednn(torch.zeros(1, 1, device="meta"))
    assert not takes_onednn(torch.zeros(0, 1))
    others = [torch.zeros(32, 48), torch.zeros(48, 32), torch.zeros(0, 32), torch.zeros(32, 32, device="meta")]
    assert not any(map(takes_int8, others))


@needs_int8
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("shape", [(32, 32), (160, 96)], ids=str)
def test_a_product_in_int8_is_off_by_no_more_than_rounding_makes_it(shape: tuple[int, int], num_rows: int) -> None:
    rng = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(shape, generator=rng), torch.randn(shape[0], generator=rng)
    weight[3] = 0
    x = torch.randn(num_rows, shape[1], generator=rng).bfloat16()
    x[0] = 0  # has no largest value
    got = kernels.int8_product(weight)(x, bias).double()
    read, exact, added = x.double(), weight.double(), bias.double()
    step, row_step = (one.abs().amax(1, keepdim=True) / kernels.BYTE for one in (exact, read))
    wanted = read @ exact.T + added
    rounded = (read.abs().sum(1, keepdim=True) @ step.T + row_step @ (exact.abs() + step).sum(1)[None]) / 2
    assert bool(((got - wanted).abs() <= 1.01 * rounded + 2.0**-8 * wanted.abs() + 1e-5).all())
    assert bool((rounded[1:] < wanted.std()).all()), "the bound holds of anything"


@needs_int8
def test_rows_are_rounded_each_by_itself() -> None:
    rng = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 32, generator=rng), torch.randn(2, 3, 32, generator=rng).bfloat16()
    multiply = kernels.int8_product(weight)
    alone = torch.stack([multiply(row) for row in x.view(6, 32)]).view(2, 3, 64)
    x[1] *= 1000
    assert torch.equal(multiply(x)[0], alone[0])
    assert multiply(x[:, :0]).shape == (2, 0, 64)


def layers() -> nn.ModuleDict:
    """One of each kind, of values that bfloat16 holds."""
    rng = torch.Generator().manual_seed(0)
    module = nn.ModuleDict({"plain": nn.Linear(32, 16, bias=False), "biased": nn.Linear(32, 16)})
    module["borrowed"] = Borrowed(torch.empty(16, 32))
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=rng).bfloat16().float()
    return module


@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("name", ["plain", "biased", "borrowed"])
def test_a_packed_layer_gives_the_rounded_product_in_the_format_of_its_input(name: str, num_rows: int) -> None:
    module, x = layers(), torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(1))
    layer = module[name]
    wanted = layer(x.bfloat16().float())
    pack(module, torch.bfloat16)
    got = layer(x)
    assert got.dtype == torch.float32
    assert bool(((got - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-5).all())
    assert not torch.equal(got, wanted), "nothing was rounded, so nothing was packed"


@pytest.mark.parametrize("num_rows", [1, 5])
def test_in_float32_a_product_stays_what_it_was(num_rows: int) -> None:
    module, x = layers(), torch.randn(num_rows, 32, generator=torch.Generator().manual_seed(1))
    wanted = {name: layer(x) for name, layer in module.items()}
    pack(module, torch.float32)
    for name, layer in module.items():
        torch.testing.assert_close(layer(x), wanted[name])


def test_names_and_values_of_weights_stay_and_what_is_borrowed_is_not_saved() -> None:
    module = layers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    pack(module, torch.bfloat16)
    assert list(before) == list(module.state_dict()) == ["plain.weight", "biased.weight", "biased.bias"]
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


@needs_int8
def test_beside_bfloat16_products_are_in_int8_where_there_is_a_kernel() -> None:
    layer = nn.Linear(32, 64, bias=False)
    x = torch.zeros(1, 32)
    x[0, 20] = 1.0
    exact, step = layer.weight[:, 20].detach(), layer.weight.detach().abs().amax(1) / 127
    nearest, allowed = (exact / step).round() * step, 2.0**-8 * exact.abs() + 1e-6
    assert bool(((exact - nearest).abs() > 2 * allowed).any()), "int8 rounds no more than bfloat16 here"
    pack(layer, torch.bfloat16)
    assert bool(((layer(x)[0] - nearest).abs() <= allowed).all())


def test_what_is_not_to_be_rounded_is_multiplied_in_the_format() -> None:
    layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(32, 64)])
    layers.load_state_dict({name: torch.randn_like(tensor) for name, tensor in layers.state_dict().items()})
    x = torch.randn(3, 32).bfloat16()
    wanted = functional.linear(x, layers[1].weight.bfloat16(), layers[1].bias.bfloat16())
    pack(layers, torch.bfloat16, [layers[1]])
    torch.testing.assert_close(layers[1](x), wanted)
