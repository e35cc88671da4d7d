"""What every training regime keeps to: it learns, can be killed, and gives back the plain model that it was given."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models import catalog, together
from models.core.evaluation.perplexity import perplexity, score
from models.core.learning import training
from models.params import BaseParams
from tests.models.regimes.world import documents, load, start, train
from tests.models.rounding import normal

NAMES = catalog.names("regimes")


def defaults(*names: str) -> list[BaseParams]:
    return [catalog.load("regimes", name).Params() for name in names]


@pytest.fixture(scope="session")
def trained(tiny_target: Path) -> "dict[str, tuple[PreTrainedModel, training.Trained]]":
    """Each method's model and report, trained once without interruption."""
    runs = {}
    for name in NAMES:
        model = load(tiny_target)
        runs[name] = (model, train(model, defaults(name)))
    return runs


@pytest.mark.parametrize("name", NAMES)
def test_training_lowers_the_loss(name: str, trained: dict, tiny_target: Path) -> None:
    model, report = trained[name]
    assert all(torch.isfinite(weight).all() for weight in model.state_dict().values())
    assert perplexity(score(model, documents())) < 0.5 * perplexity(score(load(tiny_target), documents()))
    assert report.num_steps > 0 and report.num_tokens > 0 and report.seconds > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_model_comes_out(name: str, trained: dict, tiny_target: Path, tmp_path: Path) -> None:
    model, plain = trained[name][0], load(tiny_target)
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    assert {n: (t.shape, t.dtype) for n, t in model.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in plain.state_dict().items()
    }
    for module_name, module in model.named_modules():
        assert not module._forward_hooks and not module._forward_pre_hooks, module_name
        assert "forward" not in vars(module), module_name
    assert not model.training and not model.is_gradient_checkpointing
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    token_ids = torch.tensor([documents()[0]])
    assert torch.equal(again(token_ids).logits, model(token_ids).logits)


class _Killed(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_killed_run_resumes_to_the_weights_of_one_that_was_not(name, trained, tiny_target, tmp_path) -> None:
    calls = 0

    def kill(model: torch.nn.Module, args: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise _Killed

    model = load(tiny_target)
    model.register_forward_pre_hook(kill)
    with pytest.raises(_Killed):
        train(model, defaults(name), tmp_path)
    model = load(tiny_target)
    report = train(model, defaults(name), tmp_path)
    whole, whole_report = trained[name]
    for key, weight in whole.state_dict().items():
        assert torch.equal(weight, model.state_dict()[key]), key
    assert report.losses == whole_report.losses
    assert report.figures == pytest.approx(whole_report.figures)
    assert (report.num_steps, report.num_skipped) == (whole_report.num_steps, whole_report.num_skipped)


@pytest.mark.parametrize("name", NAMES)
def test_a_regime_does_not_go_with_itself(name: str) -> None:
    with pytest.raises(ValueError, match=f'"{name}"'):
        together.require_compatible(defaults(name, name))


def test_two_regimes_that_change_the_same_part_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match='"layer_dropout" and "layer_skip_gate" both change the depth; choose one'):
        together.require_compatible(defaults("layer_dropout", "layer_skip_gate"))
    with pytest.raises(ValueError, match='"iterative_magnitude" is a loop of its own and combines with no other'):
        together.require_compatible(defaults("packing", "iterative_magnitude"))


def with_all_that_go_together(first: str) -> tuple[str, ...]:
    chosen = [first]
    for name in reversed(NAMES):
        with suppress(ValueError):
            together.require_compatible(defaults(*chosen, name))
            chosen.append(name)
    return tuple(sorted(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("names", sorted({with_all_that_go_together(name) for name in NAMES}), ids="+".join)
def test_regimes_of_different_parts_train_together(names: tuple[str, ...], tiny_target: Path) -> None:
    model, plain = load(tiny_target), load(tiny_target)
    report = train(model, defaults(*names), num_epochs=8)  # of whose steps coins leave out some
    assert report.losses[-1][1] < report.losses[0][1]
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]


@pytest.mark.parametrize(
    ("name", "settings", "atol"),
    [
        ("layer_dropout", {"max_probability": 0, "exit_scale": 0}, 0),
        # The gates' gradients take part in clipping the norm.
        ("layer_skip_gate", {"cost_weight": 0, "start": 0.999999, "floor": 0.999999}, 2e-3),
    ],
)
def test_where_no_block_is_left_out_it_is_plain_training(name, settings, atol, tiny_target) -> None:
    plain, model = load(tiny_target), load(tiny_target)
    train(plain, [], num_epochs=1)
    trained = train(model, [catalog.parse("regimes", {"name": name, **settings})], num_epochs=1)
    assert trained.figures == {"skipped_layer_share": 0}
    for key, weight in plain.state_dict().items():
        assert torch.allclose(weight, model.state_dict()[key], rtol=1e-5 if atol else 0, atol=atol), key


@pytest.mark.parametrize("name", ["blockwise_local", "layer_dropout"])
def test_a_model_of_one_block_is_refused_by_what_needs_two(name: str, tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 blocks; got 1"):
        start(catalog.load("regimes", name), load(tiny_target, num_layers=1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("dorefa", {"weight_bits": 32, "activation_bits": 32, "gradient_bits": 32}),
        ("lognormal_gradient", {"num_bits": 32}),
        # gradcheck asks for the gradient of one output at a time, of which pruning takes nothing.
        ("sparse_data_gradient", {"preserve_l1": True}),
    ],
)
def test_where_nothing_is_rounded_the_gradient_is_that_of_finite_differences(name: str, settings: dict) -> None:
    method = catalog.load("regimes", name)
    made = method.Hooks(method.Params(**settings), torch.Generator())
    inputs, weight = normal(2, 3, seed=0, dtype=torch.float64), normal(4, 3, seed=1, dtype=torch.float64)
    assert torch.autograd.gradcheck(made.multiply, (inputs.requires_grad_(True), weight.requires_grad_(True)))
