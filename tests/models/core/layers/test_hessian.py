import torch

from models.core.layers.hessian import inverse_factor


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
