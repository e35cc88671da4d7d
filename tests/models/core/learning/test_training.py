from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models import catalog
from models.core.evaluation.perplexity import perplexity, score
from models.core.learning import training
from models.params import TrainingParams


def documents(count: int = 24, length: int = 20) -> list[list[int]]:
    """Sequences that count in steps of three through 60 tokens: easy to learn, far from uniform."""
    return [[3 + (start + 3 * place) % 60 for place in range(length - start % 4)] for start in range(count)]


def params(**changes: object) -> TrainingParams:
    return TrainingParams(**{"num_epochs": 4, "batch_tokens": 128, "learning_rate": 3e-3, **changes})


@pytest.mark.slow
def test_training_lowers_the_perplexity_of_held_out_text(model: PreTrainedModel) -> None:
    before = perplexity(score(model, documents()[20:]))
    trained = training.train(model, documents()[:20], params(num_epochs=20))
    assert perplexity(score(model, documents()[20:])) < before / 5
    assert trained.num_steps == len(trained.losses) and trained.num_skipped == 0
    assert trained.num_tokens == 20 * sum(len(document) for document in documents()[:20])


@pytest.mark.slow
def test_a_checkpoint_of_other_settings_is_not_gone_on_with(model: PreTrainedModel, tmp_path: Path) -> None:
    settings = params(checkpoint_s=1e-9)
    whole = training.train(model, documents(), settings, work_dir=tmp_path, label="one")
    assert training.train(model, documents(), settings, work_dir=tmp_path, label="one").losses == whole.losses
    assert training.train(model, documents(), settings, work_dir=tmp_path, label="two").losses != whole.losses


def test_the_loss_does_not_see_padding(model: PreTrainedModel) -> None:
    short, long = documents()[3], documents()[0]
    alone = score(model, [short])[0]
    assert score(model, [short, long])[0].nats == pytest.approx(alone.nats, rel=1e-5)
    assert alone.num_tokens == len(short) - 1


def test_nothing_to_learn_is_refused(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="none of 2 documents has two tokens"):
        training.train(model, [[1], [2]], params())
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        training.train(model, documents(), params())


def test_a_loss_that_is_not_finite_ends_training(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        training.train(model, documents(), params())


def test_a_step_without_any_trained_block_changes_nothing(model: PreTrainedModel) -> None:
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    skipping = catalog.parse("regimes", {"name": "layer_dropout", "max_probability": 0.999, "exit_scale": 0.0})
    before = model.model.layers[1].mlp.up_proj.weight.clone()
    trained = training.train_by_name(model, documents(2), params(num_epochs=1), [skipping])
    assert trained.num_steps == 1 and torch.equal(model.model.layers[1].mlp.up_proj.weight, before)
