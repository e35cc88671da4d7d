"""Packed layers multiply as before to the format's rounding, and a module's weights stay what and where they were."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from models.core.layers.packed_linear import Borrowed, pack
from models.core.layers.packed_product import takes_int8

NUM_ROWS = (1, 5)


def layers() -> nn.ModuleDict:
    """One of each kind, of values that bfloat16 holds."""
    rng = torch.Generator().manual_seed(0)
    module = nn.ModuleDict({"plain": nn.Linear(32, 16, bias=False), "biased": nn.Linear(32, 16)})
    module["borrowed"] = Borrowed(torch.empty(16, 32))
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=rng).bfloat16().float()
    return module


@pytest.mark.parametrize("num_rows", NUM_ROWS)
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


@pytest.mark.parametrize("num_rows", NUM_ROWS)
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


@pytest.mark.skipif(not takes_int8(torch.zeros(32, 32)), reason="no int8 products here")
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
