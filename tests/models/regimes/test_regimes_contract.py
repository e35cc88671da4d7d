"""What every training regime keeps to: it learns, can be killed, and gives back the plain model that it was given."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models import catalog, together
from models.evaluation.perplexity import perplexity, score
from models.learning import training
from models.params import BaseParams
from tests.models.regimes.world import documents, load, train

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
def test_a_killed_run_resumes_to_the_weights_of_one_that_was_not(
    name: str, trained: dict, tiny_target: Path, tmp_path: Path
) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("first", NAMES)
def test_regimes_of_different_parts_train_together(first: str, tiny_target: Path) -> None:
    chosen = defaults(first)
    for name in reversed(NAMES):
        try:
            together.require_compatible([*chosen, *defaults(name)])
        except ValueError:
            continue
        chosen += defaults(name)
    model, plain = load(tiny_target), load(tiny_target)
    report = train(model, chosen, num_epochs=8)  # of whose steps coins leave out some
    assert report.losses[-1][1] < report.losses[0][1]
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
