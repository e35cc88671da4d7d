"""The blend of KL and total variation: by hand, and its ends."""

import math

import pytest
import torch

from models.losses import Drafted, lk_hybrid

DRAFTED = Drafted(0, torch.tensor([[0.25, 0.75]]).log(), target_probs=torch.tensor([[0.5, 0.5]]))
KL, TV = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), 0.25


def test_two_tokens_by_hand() -> None:
    weight = math.exp(-3 * 0.75)
    told = float(lk_hybrid.loss(DRAFTED, lk_hybrid.Params()))
    assert told == pytest.approx(weight * KL + (1 - weight) * TV, abs=1e-6)


@pytest.mark.parametrize(("eta", "wanted"), [(0.0, KL), (1000.0, TV)])
def test_its_ends_are_kl_and_total_variation(eta: float, wanted: float) -> None:
    assert float(lk_hybrid.loss(DRAFTED, lk_hybrid.Params(eta=eta))) == pytest.approx(wanted, abs=1e-6)
