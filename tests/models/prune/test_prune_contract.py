"""What every pruning method keeps: the pattern exactly, the shape, and more of the layer's output than chance does."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import catalog
from models.core.checkpoints.sparsity import Pattern
from models.core.layers.linears import Gram, linears
from models.params import validate
from models.prune import prune_model

METHODS = [catalog.load("prune", name) for name in catalog.names("prune")]
CALIBRATED = [method for method in METHODS if method.CALIBRATED]
PATTERNS = ("0.5", "2:4", "1:4", "4:8")
DOCUMENTS = torch.randint(3, 259, (8, 40), generator=torch.Generator().manual_seed(0)).tolist()


def method_id(method: object) -> str:
    return method.__name__.rsplit(".", maxsplit=1)[-1]


def pattern(spelt: str) -> Pattern:
    return Pattern.model_validate(spelt if ":" in spelt else float(spelt))


def layer(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer [48, 64], and 200 inputs that are correlated and of unequal size."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(64, 64, generator=rng) * torch.logspace(-1, 1, 64)
    return torch.randn(48, 64, generator=rng), torch.randn(200, 64, generator=rng) @ mixed


def require_pattern(weight: torch.Tensor, wanted: Pattern) -> None:
    if wanted.group is not None:
        assert ((weight.unflatten(1, (-1, wanted.group)) != 0).sum(dim=-1) <= wanted.kept).all()
    assert float((weight == 0).float().mean()) == pytest.approx(wanted.sparsity or 1 - wanted.kept / wanted.group)


@pytest.mark.parametrize("spelt", PATTERNS)
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_layers_zeroes_are_the_patterns_and_its_output_nearer_than_with_random_ones(method, spelt: str) -> None:
    weight, inputs = layer()
    before = weight.clone()
    pruned = method.prune(weight, Gram(inputs), pattern(spelt), method.Params())
    require_pattern(pruned, pattern(spelt))
    assert pruned.dtype == weight.dtype and torch.equal(weight, before)
    assert torch.equal(pruned, method.prune(weight, Gram(inputs), pattern(spelt), method.Params()))
    narrow = method.prune(weight.bfloat16(), Gram(inputs.bfloat16()), pattern(spelt), method.Params())
    assert narrow.dtype == torch.bfloat16
    scores = torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))
    chance = weight * pattern(spelt).keep(scores, over="row")

    error, of_chance = ((inputs @ (other - weight).T).square().sum() for other in (pruned, chance))
    assert error < 0.8 * of_chance


@pytest.mark.parametrize("spelt", ["0.5", "2:4"])
@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_whole_models_zeroes_are_the_patterns_and_survive_its_checkpoint(
    method, spelt: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    embedding = model.get_input_embeddings().weight.clone()
    shares = prune_model(model, DOCUMENTS, method.Params(), pattern(spelt))
    assert shares.keys() == {name for name, _ in linears(model)}
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    for _, each in linears(loaded):
        require_pattern(each.weight, pattern(spelt))


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_a_width_that_the_groups_do_not_divide_is_refused_before_anything_changed(method, model) -> None:
    down = model.model.layers[1].mlp.down_proj
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(250, down.out_features, bias=False)
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    with pytest.raises(ValueError, match=r"layer model\.layers\.1\.mlp\.down_proj is 250 wide, which 4 of pattern 2:4"):
        prune_model(model, DOCUMENTS, method.Params(), pattern("2:4"))
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, before)


@pytest.mark.parametrize("method", CALIBRATED, ids=method_id)
def test_missing_calibration_is_refused(method, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="calibration takes documents of at least one token; got 0"):
        prune_model(model, [], method.Params(), pattern("0.5"))
    weight, inputs = layer()
    with pytest.raises(ValueError, match="calibration has 0 tokens"):
        method.prune(weight, Gram(inputs[:0]), pattern("0.5"), method.Params())
    with pytest.raises(ValueError, match=r"inputs are 63 wide; wanted 64"):
        method.prune(weight, Gram(inputs[:, 1:]), pattern("0.5"), method.Params())


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (0.0, "greater than 0"),
        (1.0, "less than 1"),
        ("4:4", "4:4 would keep all weights"),
        ("0:4", "greater than or equal to 1"),
        ("half", "a share such as 0.5, or N:M"),
        ({"sparsity": 0.5, "kept": 2, "group": 4}, "either sparsity, or both kept and group"),
        ({"kept": 2}, "either sparsity, or both kept and group"),
        ({}, "either sparsity, or both kept and group"),
    ],
)
def test_a_pattern_that_makes_no_sense_is_refused(value: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Pattern.model_validate(value)


def test_a_pattern_can_be_written_as_a_share_as_groups_or_as_a_table() -> None:
    assert validate(Pattern, {"kept": 2, "group": 4}, "prune.pattern") == pattern("2:4")
    assert (str(pattern("2:4")), str(pattern("0.5"))) == ("2:4", "0.5")


def test_a_share_that_zeroes_no_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="sparsity 0.01 of 8 weights is not one weight zero"):
        Pattern(sparsity=0.01).keep(torch.rand(2, 8), over="row")
