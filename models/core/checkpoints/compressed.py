"""Checkpoints in the compressed-tensors format, which vLLM and transformers load: tensors of a layer, and the config.

Letters: O outputs and I inputs of a layer, G groups of a row.

"int-quantized" and "float-quantized" keep `weight` [O, I] as int8 or float8 with `weight_scale` [O, 1], and
`input_scale` [1] where the scale of inputs is fixed; "pack-quantized" keeps `weight_packed` int32 (`integers.pack`,
along I), `weight_scale` [O, G], `weight_shape`, and `weight_zero_point`, packed along O, where grids are not symmetric.
What is read is what is written here, and not all that the format can say.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from models.core.layers import integers
from models.core.layers.integers import Float8Linear, IntegerLinear, Integers

METHOD = "compressed-tensors"
INTEGER, FLOAT, PACKED = "int-quantized", "float-quantized", "pack-quantized"


def plain_parts(values: Tensor, scales: Tensor, input_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Return the tensors of one layer of int8 or float8 weights [O, I] with one scale a row [O, 1]."""
    parts = {"weight": values, "weight_scale": scales.float()}
    return parts if input_scale is None else parts | {"input_scale": input_scale.float()}


def packed_parts(weight: Integers, bits: int) -> dict[str, Tensor]:
    """Return the tensors of one layer of packed integers."""
    parts = {
        "weight_packed": integers.pack(weight.values, bits),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.values.shape),
    }
    if weight.zeros is not None:
        parts["weight_zero_point"] = integers.pack(weight.zeros.T.contiguous(), bits).T.contiguous()
    return parts


def packed_scheme(bits: int, group_size: int, symmetric: bool) -> dict[str, Any] | None:
    """Return `quantization_config` for packed weights, or None for a number of bits that engines have no kernel for."""
    if bits not in (4, 8):
        return None
    grid = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": group_size, "symmetric": symmetric}
    return _scheme(PACKED, grid, None)


def plain_scheme(form: str, dynamic: bool) -> dict[str, Any]:
    """Return `quantization_config` for 8-bit weights with a scale a row; inputs have one a token or one in all."""
    shared = {"num_bits": 8, "type": "int" if form == INTEGER else "float", "symmetric": True}
    inputs = {**shared, "strategy": "token" if dynamic else "tensor", "dynamic": dynamic}
    return _scheme(form, {**shared, "strategy": "channel"}, inputs)


def _scheme(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
    return {
        "quant_method": METHOD,
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def restore(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """Put float32 weights in place of quantized ones, without scales of inputs; ValueError for forms of others."""
    bits = known_bits(quantization)
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        scales = tensors.get(f"{layer}.weight_scale")
        if part == "weight_packed":
            num_rows, width = tensors[f"{layer}.weight_shape"].tolist()
            num_bits, zeros = bits.get(layer, bits["Linear"]), tensors.get(f"{layer}.weight_zero_point")
            values = integers.unpack(tensor, num_bits, width)
            zeros = None if zeros is None else integers.unpack(zeros.T, num_bits, num_rows).T
            plain[f"{layer}.weight"] = Integers(values, tensors[f"{layer}.weight_scale"], zeros).floats()
        elif part == "weight" and scales is not None:
            plain[name] = tensor.float() * scales.float()
        elif part not in ("weight_scale", "weight_shape", "weight_zero_point", "input_scale"):
            plain[name] = tensor
    return plain


def round_inputs(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put layers that round their inputs, as engines do, in place of linear ones that are stored so.

    Layers of packed weights round no inputs and stay. ValueError if a layer that is stored so is no `nn.Linear`; names
    it.
    """
    for layer in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        if (values := tensors.get(f"{layer}.weight")) is None:
            continue
        scales, linear = tensors[f"{layer}.weight_scale"], model.get_submodule(layer)
        if not isinstance(linear, nn.Linear):
            raise ValueError(f"layer {layer} is a {type(linear).__name__}; inputs are rounded for nn.Linear")
        made: nn.Module = Float8Linear(values, scales, linear.bias)
        if values.dtype == torch.int8:
            made = IntegerLinear(Integers(values, scales), linear.bias, tensors.get(f"{layer}.input_scale"))
        model.set_submodule(layer, made)


def known_bits(quantization: Mapping[str, Any]) -> dict[str, int]:
    """Return "Linear", and each layer that is an exception, to its bits a weight; ValueError for forms of others."""
    if quantization.get("quant_method") != METHOD:
        raise ValueError(f"weights quantized by {quantization.get('quant_method')!r} can't be read; {METHOD} can")
    form, bits = quantization.get("format"), dict[str, int]()
    for group in quantization["config_groups"].values():
        weights, inputs = group["weights"], group.get("input_activations")
        plain = inputs is None and weights.get("actorder") != "group"
        rounds = inputs is not None and inputs.get("symmetric", True)
        by_row = rounds and weights.get("symmetric", True) and weights["strategy"] == "channel"
        if not (form == PACKED and plain) and not (form in (INTEGER, FLOAT) and by_row):
            said = f"with {weights} and inputs {inputs}"
            raise ValueError(f"a {METHOD} checkpoint of format {form!r} {said} can't be read")
        bits |= dict.fromkeys(group["targets"], weights["num_bits"])
    if "Linear" not in bits or any(name.startswith("re:") for name in bits):
        said = f"for layers {', '.join(sorted(bits))}"
        raise ValueError(f"a {METHOD} checkpoint {said} can't be read; one for Linear can")
    return bits
