"""Low rank: each linear layer W becomes U·V of rank r, the best of that rank for the inputs it really gets.

With the Gram matrix G = XᵀX of calibration inputs and any S of S·Sᵀ = G (whitening), SVD-LLM truncates the singular
values of W·S and takes S off again. The r left singular vectors U of W·S that are kept give the same W' = U·(UᵀW)
without an inverse, so that a singular G needs no dampening.

What is saved is W' in the shape of W, which every engine takes while neither file nor product get smaller, or with
`keep` "factors" the two factors of r·(O+I) numbers, which the reference engine multiplies by. The config notes ranks
and form under "redraft". Finetuning cuts what it merged to the rank again and keeps the form; other stages would lose
the rank and are refused, and another shape drops the note.
"""

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models import catalog
from models.core.checkpoints.invariants import note
from models.core.layers.linears import Gram, calibrate, linears
from models.params import TrainingParams
from models.shrink import Measured, pieces, shape_of

PAPER = "arXiv:2403.07378, section 3 (SVD-LLM, truncation-aware data whitening)"
KEEPS_TOKENS = True
CHANGES, KEEPS = ("zeroes",), ("low rank",)


class Params(Measured):
    """The rank, as a share of the largest that saves anything."""

    name: Literal["low_rank"] = "low_rank"
    share: float = Field(gt=0, lt=1, description="of a layer's weights that its two factors may hold together.")
    keep: Literal["matrices", "factors"] = Field(
        "matrices", description="what the checkpoint holds of a layer, the matrix or its factors."
    )


CORNERS = (Params(share=0.5), Params(share=0.5, keep="factors"))


def require_engine(params: Params, engine: str) -> None:
    """Raise ValueError if an engine can't multiply by what the checkpoint will hold."""
    if params.keep == "factors" and not getattr(catalog.load("engines", engine), "FACTORS", False):
        raise ValueError(
            f'engine "{engine}" multiplies by whole matrices: keep = "matrices", or [engine] name = "torch"'
        )


def shrink(
    model: PreTrainedModel, documents: Sequence[Sequence[int]], params: Params, training: TrainingParams, seed: int = 0
) -> PreTrainedModel:
    """Return a model whose linear layers are of low rank; a block is fitted on what the blocks before it give by then.

    ValueError as `models.shrink`; a layer can't be handled or is too small for a rank (names it), or calibration has
    fewer tokens than a rank.
    """
    shape_of(model)
    ranks = {name: rank_of(layer.weight, params.share, name) for name, layer in linears(model)}
    calibration = pieces(documents, params, training, seed)
    if (num_tokens := sum(map(len, calibration))) < max(ranks.values()):
        raise ValueError(f"calibration has {num_tokens} tokens; rank {max(ranks.values())} takes at least as many")
    shrunk = copy.deepcopy(model)

    def visit(name: str, layer: nn.Linear, inputs: Gram) -> None:
        layer.weight.copy_(truncate(layer.weight, inputs, ranks[name]))

    calibrate(shrunk, calibration, Gram, visit)
    note(shrunk, "ranks", ranks)
    if params.keep == "factors":
        note(shrunk, "factors", True)
    shrunk.eval()
    return shrunk


def rank_of(weight: Tensor, share: float, name: str) -> int:
    """Return the rank at which two factors hold `share` of the weights; ValueError naming a layer with less than 1."""
    rank = int(share * weight.numel() / sum(weight.shape))
    if rank < 1:
        raise ValueError(f"layer {name} is {list(weight.shape)}; factors of rank 1 hold more than {share:g} of it")
    return rank


def truncate(weight: Tensor, inputs: Gram, rank: int) -> Tensor:
    """Return the best approximation of a rank, from 1, of a weight [O, I] on its inputs; of its dtype."""
    exact = weight.double()
    gram = inputs.matrix.double()
    left: Tensor
    if weight.shape[0] <= weight.shape[1]:
        # Left singular vectors of W·S are eigenvectors of W·G·Wᵀ, whichever S it is.
        left = torch.linalg.eigh(exact @ gram @ exact.T).eigenvectors[:, -rank:]
    else:
        # The other way about the matrix is the smaller one; S = G^½.
        values, vectors = torch.linalg.eigh(gram)
        whitened = exact @ (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        right = torch.linalg.eigh(whitened.T @ whitened).eigenvectors[:, -rank:]
        left = torch.linalg.qr(whitened @ right).Q
    return (left @ (left.T @ exact)).to(weight.dtype)
