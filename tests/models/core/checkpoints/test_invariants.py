from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from models import adapters, catalog, quantize
from models.core.checkpoints.invariants import PreservedStructure, keep_zeroes, noted, require, require_noted
from models.core.checkpoints.loading import load_model, read_tensors, save_model
from models.core.checkpoints.sparsity import Pattern
from models.core.layers.decoder import Cache, Decoder
from models.core.layers.linears import linears
from models.core.layers.reshape import take_layers
from models.core.learning.training import train_by_name
from models.params import TrainingParams
from models.prune import magnitude, prune_model
from models.shrink import low_rank, num_stored

DOCUMENTS = torch.randint(3, 259, (8, 48), generator=torch.Generator().manual_seed(0)).tolist()
TRAINING = TrainingParams(num_epochs=1, batch_tokens=128, learning_rate=1e-2)
STORED = [name for name in catalog.names("quantize") if catalog.load("quantize", name).STORED]


@pytest.fixture
def pruned(model: PreTrainedModel) -> PreTrainedModel:
    prune_model(model, [], magnitude.Params(), Pattern(kept=2, group=4))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", STORED)
def test_what_is_stored_of_a_pruned_model_has_its_pattern(name: str, pruned: PreTrainedModel, tmp_path: Path) -> None:
    settings = {"symmetric": False} if "symmetric" in catalog.load("quantize", name).Params.model_fields else {}
    params = catalog.parse("quantize", {"name": name, **settings})
    quantize.train_for(params, pruned, DOCUMENTS, TRAINING)
    layers = [layer for layer, _ in linears(pruned)]
    quantize.save(catalog.load("quantize", name).quantize(pruned, DOCUMENTS, params), tmp_path)
    tensors = read_tensors(tmp_path)
    for layer in layers:
        zeroes = (tensors[f"{layer}.weight"].unflatten(1, (-1, 4)) == 0).sum(-1)
        assert int(zeroes.min()) >= 2, f"{layer}: {float((zeroes >= 2).float().mean()):.0%} of groups"


@pytest.mark.parametrize("regime", [None, "dorefa", "packing"])
def test_training_a_pruned_model_leaves_its_zeroes_and_learns(regime: str | None, pruned: PreTrainedModel) -> None:
    before = {name: layer.weight.clone() for name, layer in linears(pruned)}
    methods = [catalog.parse("regimes", {"name": regime})] if regime else []
    train_by_name(pruned, DOCUMENTS, TRAINING, methods)
    require(pruned)
    assert all(not torch.equal(layer.weight, before[name]) for name, layer in linears(pruned))


@pytest.mark.parametrize(("pattern", "said"), [(Pattern(kept=2, group=4), "2:4"), (Pattern(sparsity=0.3), r"0\.3")])
def test_a_broken_promise_is_named_by_layer(pattern: Pattern, said: str, model: PreTrainedModel) -> None:
    prune_model(model, [], magnitude.Params(), pattern)
    require(model)
    model.model.layers[1].mlp.up_proj.weight.data += 1
    with pytest.raises(ValueError, match=rf"layer model\.layers\.1\.mlp\.up_proj was pruned to {said}, and is not"):
        require(model)


def test_a_config_that_says_nothing_more_of_a_layer_is_refused_by_its_name(pruned: PreTrainedModel) -> None:
    config = deepcopy(pruned.config)
    require_noted(config, pruned.config)
    require_noted(AutoConfig.for_model("llama"), config)  # nothing was promised
    del config.redraft["patterns"]["model.layers.1.mlp.up_proj"]
    with pytest.raises(ValueError, match=r"promised of layer model\.layers\.1\.mlp\.up_proj is not noted any more"):
        require_noted(pruned.config, config)


def finetuned(model: PreTrainedModel) -> tuple[PreservedStructure, PreTrainedModel]:
    """Return what a model promised, and what training and merging a low-rank part made of it."""
    held = PreservedStructure(model)
    adapted = adapters.attach(model, catalog.parse("adapters", {"name": "lora"}), torch.Generator().manual_seed(0))
    train_by_name(adapted.model, DOCUMENTS, TRAINING, [])
    return held, adapters.merge(adapted)


def test_a_merged_adapter_is_cut_to_the_rank_again_and_bfloat16_does_not_count(model: PreTrainedModel) -> None:
    held, merged = finetuned(low_rank.shrink(model, DOCUMENTS, low_rank.Params(share=0.5), TRAINING))
    with pytest.raises(ValueError, match=r"q_proj was cut to rank \d+, and has a higher one now"):
        require(merged)
    held.put_back(merged)
    require(merged.bfloat16())
    name, layer = next(linears(merged))
    rank = noted(merged.config).ranks[name]
    assert torch.linalg.svdvals(layer.weight.float())[rank - 1] > 0


def test_factors_are_stored_run_and_kept_by_finetuning(
    model: PreTrainedModel, tiny_target: Path, tmp_path: Path
) -> None:
    stored, again = tmp_path / "factors", tmp_path / "finetuned"

    def saved(one: PreTrainedModel, directory: Path, like: Path) -> int:
        directory.mkdir()
        save_model(one, directory, like)
        return (directory / "model.safetensors").stat().st_size

    shrunk = low_rank.shrink(model, DOCUMENTS, low_rank.Params(share=0.4, keep="factors"), TRAINING)
    whole = low_rank.shrink(model, DOCUMENTS, low_rank.Params(share=0.4, keep="matrices"), TRAINING)
    size, held = saved(shrunk, stored, tiny_target), num_stored(shrunk)
    assert size == pytest.approx(2 * held, rel=0.03) and num_stored(whole) == model.num_parameters() > 1.5 * held

    loaded, token_ids = load_model(stored), torch.arange(3, 40)
    require(loaded)
    decoder = Decoder.load(stored, torch.float32)
    with torch.inference_mode():
        wanted = loaded(token_ids[None], use_cache=False).logits[0]
        states, _ = decoder.forward(token_ids, Cache(decoder, 64))
        assert torch.allclose(decoder.logits(states), wanted, atol=1e-3)

    before, merged = finetuned(loaded)
    before.put_back(merged)
    assert saved(merged, again, stored) == pytest.approx(size, rel=0.01)
    require(load_model(again))


@pytest.mark.parametrize("name", catalog.names("prune"))
def test_what_was_zero_before_pruning_stays_so(name: str, model: PreTrainedModel) -> None:
    rng = torch.Generator().manual_seed(0)
    for _, layer in linears(model):
        layer.weight.data.masked_fill_(torch.rand(layer.weight.shape, generator=rng) < 0.4, 0)
    zero = {name: layer.weight == 0 for name, layer in linears(model)}
    prune_model(model, DOCUMENTS, catalog.parse("prune", {"name": name}), Pattern(kept=2, group=4))
    require(model)
    assert all((layer.weight[zero[name]] == 0).all() for name, layer in linears(model))


def test_zeroes_of_another_shape_are_promised_anew_with_their_own_shares(pruned: PreTrainedModel) -> None:
    shrunk = take_layers(pruned, [1])
    assert not noted(shrunk.config).patterns
    keep_zeroes(pruned, shrunk)
    require_noted(pruned.config, shrunk.config)
    assert noted(shrunk.config).patterns.keys() == {name for name, _ in linears(shrunk)}
    require(shrunk)
    shrunk.model.layers[0].mlp.up_proj.weight.data += 1
    with pytest.raises(ValueError, match=r"up_proj was pruned to 0\.5, and is not any more"):
        require(shrunk)


def test_a_dense_model_promises_nothing_and_neither_does_one_of_another_shape(model: PreTrainedModel) -> None:
    assert not any(noted(model.config))
    require(model)
    shrunk = take_layers(model, [1])
    keep_zeroes(model, shrunk)
    assert not any(noted(shrunk.config))
