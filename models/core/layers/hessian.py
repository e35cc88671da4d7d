"""What pruning and rounding one weight at a time need of the inputs: how an error of one weight is made up for."""

import torch
from torch import Tensor


def inverse_factor(hessian: Tensor, dampening: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse Hessian of a layer's squared error (arXiv:2210.17323, section 3).

    `hessian` [I, I] is Xᵀ X of the inputs X [N, I] or a multiple of it, to whose diagonal a share of its mean is added.
    Of U [I, I] an error in feature i is made up for in later features by its row i, over U[i, i].
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    # A feature that was never seen has a row of zeros: any positive number leaves it by itself.
    hessian = hessian + torch.diag(torch.where(diagonal > 0, dampening * mean, mean.clamp(min=1e-6)))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor
