"""qat: gradients pass straight through, training serves the rounded model better than rounding afterwards."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models import quantize
from models.core.evaluation.perplexity import perplexity, score
from models.core.learning import training
from models.params import TrainingParams
from models.quantize import qat
from tests.models.regimes.world import documents, load


def test_gradients_are_those_of_the_rounded_weights_product(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp.up_proj
    params = qat.Params(bits=2, group_size=32)
    regime = qat.Hooks(params, torch.Generator())
    regime.start(model, None)
    inputs = torch.randn(5, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    layer(inputs).square().sum().backward()
    rounded = params.round(layer.weight.detach()).floats()
    outputs = inputs.detach() @ rounded.T
    assert torch.allclose(inputs.grad, 2 * outputs @ rounded, rtol=1e-4, atol=1e-5)
    assert torch.allclose(layer.weight.grad, 2 * outputs.T @ inputs.detach(), rtol=1e-4, atol=1e-5)
    regime.finish(model)
    assert torch.equal(layer(inputs), inputs @ layer.weight.T)


@pytest.mark.slow
def test_trained_with_two_bits_beats_rounded_to_two_bits(tiny_target: Path) -> None:
    counting = documents(24)
    params = qat.Params(bits=2, group_size=32)
    found = {}
    for aware in (True, False):
        model = load(tiny_target)
        settings = TrainingParams(num_epochs=15, batch_tokens=128, learning_rate=3e-3)
        if aware:
            quantize.train_for(params, model, counting, settings)
        else:
            training.train(model, counting, settings)
        found[aware] = perplexity(score(qat.quantize(model, [], params).model, counting))
    assert found[True] < 0.8 * found[False]
