import pytest
import torch
from torch import Tensor

from models.regimes.predictive_sign_gradient import Hooks, Params, most_significant, predict_signs
from tests.models.rounding import normal


def weight_gradient(inputs: Tensor, gradient: Tensor, **settings: object) -> tuple[Tensor, dict[str, float]]:
    """Run one product forward and backward."""
    made = Hooks(Params(**settings), torch.Generator())
    weight = torch.zeros(gradient.shape[-1], inputs.shape[-1], dtype=inputs.dtype, requires_grad=True)
    made.multiply(inputs, weight).backward(gradient)
    return weight.grad, made.figures()


def test_the_high_bits_by_hand() -> None:
    # Five bits: the largest becomes 15. Three of them: multiples of 4, at most 3 of them.
    high, wide = most_significant(torch.tensor([30.0, -30.0, 13.0, -7.0, 3.0, 0.0]), 5, 3)
    assert wide.tolist() == [15, -15, 6, -4, 2, 0]
    assert high.tolist() == [12, -12, 8, -4, 0, 0]  # 6 and 2 are ties, 1.5 and 0.5 of the unit


def test_a_sign_is_predicted_from_the_threshold_on() -> None:
    low, wide = torch.tensor([[10.0, -1.0], [0.9, 0.0]]), torch.tensor([[9.0, 2.0], [-3.0, -1.0]])
    signs, predicted = predict_signs(low, wide, beta=0.1)
    assert predicted.tolist() == [[True, True], [False, False]]
    assert signs.tolist() == [[1, -1], [-1, -1]]


def test_beta_0_believes_every_prediction_and_beta_1_only_the_largest() -> None:
    inputs, gradient = normal(50, 16, seed=0), normal(50, 8, seed=1)
    shares = [weight_gradient(inputs, gradient, beta=beta)[1]["predicted_share"] for beta in (0, 0.05, 0.5, 1)]
    assert shares[0] == 1 and shares[-1] == 1 / 128
    assert shares == sorted(shares, reverse=True) and shares[1] > 0.5


def test_with_all_bits_the_signs_are_those_of_the_exact_product() -> None:
    inputs, gradient = normal(50, 16, seed=0, dtype=torch.float64), normal(50, 8, seed=1, dtype=torch.float64)
    settings = {"activation_bits": 16, "gradient_bits": 16, "activation_msb": 16, "gradient_msb": 16, "beta": 0.01}
    signs, figures = weight_gradient(inputs, gradient, **settings)
    assert torch.equal(signs.sign(), (gradient.T @ inputs).sign()) and figures["sign_agreement"] == 1
    assert torch.allclose(signs.abs(), torch.tensor(1 / 128, dtype=torch.float64).sqrt())  # of norm 1


def test_a_few_loud_features_do_not_silence_the_others() -> None:
    inputs, gradient = normal(200, 64, seed=0), normal(200, 32, seed=1)
    _, even = weight_gradient(inputs, gradient)
    inputs[:, :4] *= 60
    _, loud = weight_gradient(inputs, gradient)
    assert loud["predicted_share"] == pytest.approx(even["predicted_share"], abs=0.02) and even["predicted_share"] > 0.7


def test_the_data_gradient_is_exact() -> None:
    made = Hooks(Params(), torch.Generator())
    inputs, weight = (normal(3, n, seed=n, dtype=torch.float64) for n in (4, 5))
    weight = weight[:, :4].contiguous()
    assert torch.autograd.gradcheck(lambda x: made.multiply(x, weight), inputs.requires_grad_(True))


def test_a_layer_without_gradient_is_left_alone() -> None:
    gradient, figures = weight_gradient(normal(5, 4, seed=0), torch.zeros(5, 3))
    assert not gradient.any() and figures["sign_agreement"] == 1
