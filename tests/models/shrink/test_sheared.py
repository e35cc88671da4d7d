import math
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.core.evaluation.perplexity import perplexity, score
from models.core.layers.reshape import take_layers
from models.core.learning import training
from models.core.learning.training import Progress
from models.params import TrainingParams
from models.regimes import Regime
from models.shrink import Shape, sheared

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 1, "num_layers": 1, "min_mask_steps": 1}


def documents(count: int = 48, length: int = 20) -> list[list[int]]:
    """Sequences that count in steps of three through 60 tokens."""
    return [[3 + (start + 3 * place) % 60 for place in range(length)] for start in range(count)]


def settings(**changes: object) -> TrainingParams:
    return TrainingParams(**{"num_epochs": 10, "batch_tokens": 128, "learning_rate": 3e-3, **changes})


def masks(model: PreTrainedModel, **asked: int) -> sheared.Masks:
    config = model.config
    has = Shape(2, config.hidden_size, config.intermediate_size, config.num_attention_heads, 1)
    return sheared.Masks(model, has._replace(**asked), sheared.Params(num_layers=1), torch.Generator().manual_seed(0))


def test_the_chance_that_a_mask_is_open_is_that_of_the_draws(model: PreTrainedModel) -> None:
    mask = masks(model, intermediate_size=128)
    mask.scores["channels"].data.fill_(-1.0)
    drawn = torch.cat([mask._draw(mask.scores["channels"]).flatten() for _ in range(100)])
    wanted = 1 / (1 + math.exp(1 + 2 / 3 * math.log(0.1 / 1.1)))
    # 51,200 draws: 4.4 standard errors, passed by a right one but for a chance of 1e-5.
    assert float((drawn > 0).float().mean()) == pytest.approx(wanted, abs=4.4 * math.sqrt(0.25 / 51_200))
    assert mask.figures() == pytest.approx({"open_channels": wanted})


def test_open_masks_change_nothing_and_are_taken_off_again(model: PreTrainedModel) -> None:
    mask = masks(model, hidden_size=64, intermediate_size=64, num_heads=1, num_layers=1)
    for scores in mask.scores.values():
        scores.data.fill_(100.0)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = model(ids).logits
        mask.start(model, 10)
        with mask.around(0):
            torch.testing.assert_close(model(ids).logits, before)
        mask.finish(model)
        assert torch.equal(model(ids).logits, before)


def test_the_cut_model_computes_what_the_masked_one_did(model: PreTrainedModel) -> None:
    mask = masks(model, hidden_size=64, intermediate_size=64, num_heads=1, num_layers=1)
    rng = torch.Generator().manual_seed(1)
    for kind, scores in mask.scores.items():
        order = torch.rand(scores.shape, generator=rng).argsort(dim=-1).argsort(dim=-1)
        scores.data = torch.where(order < mask.wanted[kind], 100.0, -100.0)
    ids = torch.arange(3, 20)[None]
    mask.start(model, 10)
    with torch.no_grad(), mask.around(0):
        masked = model(ids).logits
    mask.finish(model)
    torch.testing.assert_close(mask.cut(model)(ids).logits, masked, rtol=1e-3, atol=1e-3)


def test_the_share_that_is_open_comes_to_the_share_that_is_asked_for(model: PreTrainedModel) -> None:
    mask = masks(model, hidden_size=64, intermediate_size=64, num_heads=1, num_layers=1)
    training.train(model, documents(), settings(), [mask])
    wanted = {"open_hidden": 0.5, "open_channels": 0.25, "open_heads": 0.5, "open_layers": 0.5}
    assert mask.figures() == pytest.approx(wanted, abs=0.2)


def test_the_shape_is_exact_and_the_model_still_learns(model: PreTrainedModel) -> None:
    training.train(model, documents(), settings())
    less = sheared.shrink(model, documents(), sheared.Params(**SHAPE), settings())
    config = less.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (1, 64, 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (1, 1, 64)
    assert perplexity(score(less, documents()[:8])) < 5


def test_a_channel_that_matters_is_kept(model: PreTrainedModel) -> None:
    training.train(model, documents(), settings(num_epochs=5))
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight[:, ::2] = 0
            block.mlp.up_proj.weight[::2] = 0
    mask = masks(model, intermediate_size=128)
    training.train(model, documents(), settings(num_epochs=5, learning_rate=1e-9), [mask])
    kept = mask.scores["channels"].topk(128).indices
    assert float((kept % 2).float().mean()) > 0.6


class _Stop(Exception):
    pass


def test_masks_of_a_killed_run_go_on_where_they_were(model: PreTrainedModel, tmp_path: Path) -> None:
    class Kill(Regime):
        def runs(self, step: int) -> bool:
            if step == 5 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                raise _Stop
            return True

    def run(hooks: list[Regime], work_dir: Path | None) -> sheared.Masks:
        fresh = take_layers(model, [0, 1])
        mask = masks(fresh, intermediate_size=128, hidden_size=64)
        short = settings(num_epochs=2, checkpoint_s=1e-9)
        training.train(fresh, documents(24), short, [mask, *hooks], work_dir=work_dir)
        return mask

    with pytest.raises(_Stop):
        run([Kill()], tmp_path)
    resumed, whole = run([Kill()], tmp_path), run([], None)
    for kind, scores in whole.scores.items():
        assert torch.equal(resumed.scores[kind], scores)
        assert torch.equal(resumed.multipliers[kind], whole.multipliers[kind])


def test_progress_counts_both_halves(model: PreTrainedModel) -> None:
    seen: list[Progress] = []
    short = settings(num_epochs=1)
    sheared.shrink(model, documents(8), sheared.Params(**SHAPE), short, on_progress=seen.append)
    assert [one.done for one in seen] == [80, 160] and {one.total for one in seen} == {160}


@pytest.mark.parametrize(
    ("count", "asked", "fault"),
    [
        (1, SHAPE, "1 documents leave one half empty at mask_share 0.5"),
        (48, {"num_layers": 3}, "num_layers is asked to be 3, the model has 2"),
        (48, {"num_layers": 1}, "masks would be learnt in 40 steps; min_mask_steps is 200"),
    ],
)
def test_what_can_not_be_learnt_is_refused(model: PreTrainedModel, count: int, asked: dict, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        sheared.shrink(model, documents(count), sheared.Params(**asked), settings())
