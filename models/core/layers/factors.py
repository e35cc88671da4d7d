"""Layers of low rank as two factors, W = left · right: fewer bytes in a file, and fewer products where rank is low.

Letters: O outputs and I inputs of a layer, r rank. In a checkpoint `left` [O, r] and `right` [r, I] stand for a layer's
`weight`. Our own loaders multiply them out; the reference engine multiplies by one after the other (`stacked`). vLLM
and transformers know whole matrices alone.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.core.layers.kernels import Product, product

LEFT, RIGHT = "left", "right"


def split(tensors: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """Put factors in place of the weights of layers, exact for a weight of the rank that `ranks` gives its layer."""
    parts = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in ranks}
    for layer, rank in ranks.items():
        weight = tensors[f"{layer}.weight"]
        left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
        root = values[:rank].sqrt()  # half of each, so that neither loses more in rounding
        parts[f"{layer}.{LEFT}"] = (left[:, :rank] * root).to(weight.dtype)
        parts[f"{layer}.{RIGHT}"] = (root[:, None] * right[:rank]).to(weight.dtype)
    return parts


def join(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multiply factors out to float32 weights; what is none stays as it is."""
    plain = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part == LEFT:
            plain[f"{layer}.weight"] = tensor.float() @ tensors[f"{layer}.{RIGHT}"].float()
        elif part != RIGHT:
            plain[name] = tensor
    return plain


def stacked(left: Sequence[Tensor], right: Sequence[Tensor]) -> Product:
    """Return the product with the matrices of layers, one below the other, that read the same input."""
    inner, outer, ranks = product(torch.cat(list(right))), [product(one) for one in left], list(map(len, right))

    def multiply(x: Tensor, bias: Tensor | None = None) -> Tensor:
        parts = inner(x).split(ranks, -1)
        output = torch.cat([one(part.contiguous()) for one, part in zip(outer, parts, strict=True)], -1)
        return output if bias is None else output + bias

    return multiply
