from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.params import TrainingParams
from models.shrink import depth
from tests.models.regimes.world import built

TRAINING = TrainingParams()


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return built(tmp_path, num_layers=4, intermediate_size=64)


def silence(model: PreTrainedModel, number: int, scale: float) -> None:
    """Make a block add `scale` of what it adds."""
    with torch.no_grad():
        model.model.layers[number].self_attn.o_proj.weight.mul_(scale)
        model.model.layers[number].mlp.down_proj.weight.mul_(scale)


def test_a_block_that_adds_nothing_has_no_influence_and_goes_first(model: PreTrainedModel) -> None:
    silence(model, 2, 0)
    texts = [list(range(3, 40)), [5, 9, 7]]
    scores = depth.influence(model, texts)
    assert scores[2] == pytest.approx(0, abs=1e-6) and (scores[[0, 1, 3]] > 0.01).all()
    less = depth.shrink(model, texts, depth.Params(num_layers=3), TRAINING)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(less(ids).logits, model(ids).logits)


def test_influence_is_a_mean_over_tokens_and_not_over_documents(model: PreTrainedModel) -> None:
    long, short = list(range(3, 33)), list(range(40, 50))
    apart = [depth.influence(model, [text]) for text in (long, short)]
    torch.testing.assert_close(depth.influence(model, [long, short]), (30 * apart[0] + 10 * apart[1]) / 40)


def test_the_influence_of_the_last_block_is_taken_before_the_final_norm(model: PreTrainedModel) -> None:
    text = list(range(3, 33))
    before = depth.influence(model, [text])
    with torch.no_grad():
        model.model.norm.weight.uniform_(-5, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(depth.influence(model, [text]), before)


def test_spread_blocks_need_no_documents(model: PreTrainedModel) -> None:
    silence(model, 3, 0)
    less = depth.shrink(model, [], depth.Params(num_layers=2, keep="spread"), TRAINING)
    for block, number in zip(less.model.layers, (0, 3), strict=True):
        assert torch.equal(block.mlp.up_proj.weight, model.model.layers[number].mlp.up_proj.weight)


@pytest.mark.parametrize("num_layers", [4, 5])
def test_a_model_that_is_no_deeper_is_refused(model: PreTrainedModel, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"num_layers must be 1 to 3, less than the model's; got {num_layers}"):
        depth.shrink(model, [[3, 4]], depth.Params(num_layers=num_layers), TRAINING)
