"""Regimes of little code by hand: what they leave equal, what they hold, what they leave out; the others have files."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.core.evaluation.perplexity import perplexity, score
from models.core.learning.counting import counted
from models.params import validate
from models.regimes import (
    bf16,
    blockwise_local,
    checkpointing,
    layer_dropout,
    layer_skip_gate,
    minibatch_drop,
    paged_state,
)
from tests.models.regimes.world import batch, documents, gradients, held, load, start, train


def test_products_are_in_bfloat16_and_weights_and_loss_are_not(tiny_target) -> None:
    model, seen = load(tiny_target), []
    regime = start(bf16, model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with regime.around(0):
        loss = model(**batch()).loss
        loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert {weight.grad.dtype for weight in model.parameters()} == {torch.float32}


def test_in_bfloat16_the_gradient_is_that_of_float32_up_to_rounding(model) -> None:
    exact = gradients(model)
    with start(bf16, model).around(0):
        rounded = gradients(model)
    for name, gradient in exact.items():
        # bfloat16 has 8 bits of mantissa; errors of products add up over two layers.
        assert (gradient - rounded[name]).norm() < 0.05 * gradient.norm(), name


def test_in_bfloat16_less_is_held_for_each_token(model) -> None:
    regime = start(bf16, model)

    def held_for_eight_rows() -> int:
        few, many = (torch.ones(num_rows, 32, dtype=torch.int64) for num_rows in (8, 16))
        return held(model, input_ids=many, labels=many) - held(model, input_ids=few, labels=few)

    plain = held_for_eight_rows()
    with regime.around(0):
        assert held_for_eight_rows() < 0.75 * plain


def test_in_bfloat16_weights_of_another_format_than_float32_are_refused(tiny_target) -> None:
    with pytest.raises(ValueError, match="keeps weights in float32; the model's are torch.bfloat16"):
        start(bf16, load(tiny_target).to(torch.bfloat16))


def test_a_groups_gradient_is_that_of_its_own_loss(model) -> None:
    inputs = batch()
    first = copy.deepcopy(model)
    first.config.num_hidden_layers = 1  # block 0, the norm and the output matrix
    local, whole = gradients(first), gradients(model)
    start(blockwise_local, model, num_groups=2)
    learnt = gradients(model)
    assert inputs["input_ids"].shape[0] > 1
    for name in learnt:
        if "layers.0" in name:
            assert torch.allclose(learnt[name], local[name], rtol=1e-4, atol=1e-7), name
            assert not torch.allclose(learnt[name], whole[name], rtol=1e-2), name
        if "layers.1" in name:
            assert torch.allclose(learnt[name], whole[name], rtol=1e-4, atol=1e-7), name


def test_group_by_group_less_is_held_than_end_to_end(tiny_target) -> None:
    model = load(tiny_target, num_layers=4)
    plain = held(model)
    start(blockwise_local, model)
    assert held(model) < 0.45 * plain


def test_groups_change_nothing_in_evaluation(tiny_target) -> None:
    model = load(tiny_target).eval()
    plain = model(**batch()).logits
    start(blockwise_local, model)
    assert torch.equal(model(**batch()).logits, plain)


def test_a_group_of_frozen_blocks_trains_its_norm_alone(tiny_target) -> None:
    model = load(tiny_target).requires_grad_(False)
    model.model.layers[1].requires_grad_(True)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model, [blockwise_local.Params()], num_epochs=1)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved and all(name.startswith("model.layers.1.") for name in moved)


def test_checkpointed_gradients_are_equal_and_less_is_held_for_more_flops(tiny_target) -> None:
    model = load(tiny_target, num_layers=4)
    with counted(model) as plain:
        exact = gradients(model)
    regime = start(checkpointing, model)
    with counted(model) as checkpointed:
        again = gradients(model)
    regime.finish(model)
    for name, gradient in exact.items():
        assert torch.equal(gradient, again[name]), name
    # Four blocks' worth are held without, one block's with: the output matrix's part is the same.
    assert checkpointed.peak_activation_bytes < 0.5 * plain.peak_activation_bytes
    assert 1.15 < checkpointed.flops / plain.flops < 4 / 3  # the blocks' forward pass once more, not the output's


def test_checkpoints_of_every_second_block_hold_what_lies_between(tiny_target) -> None:
    peaks = []
    for every in (1, 2):
        model = load(tiny_target, num_layers=4)
        start(checkpointing, model, every=every)
        peaks.append(held(model))
    assert peaks[0] < peaks[1]


def test_checkpointed_blocks_learn_though_the_embedding_is_frozen(model) -> None:
    model.model.embed_tokens.requires_grad_(False)
    exact = gradients(model)
    start(checkpointing, model)
    again = gradients(model)
    assert exact.keys() == again.keys() and "model.layers.0.mlp.up_proj.weight" in exact
    assert all(torch.equal(gradient, again[name]) for name, gradient in exact.items())


def test_a_model_that_is_checkpointed_already_is_refused(model) -> None:
    start(checkpointing, model)
    with pytest.raises(ValueError, match="checkpointed already"):
        start(checkpointing, model)


def test_layer_dropouts_probabilities_and_exit_weights_by_hand() -> None:
    assert layer_dropout.probabilities(3, 0.1).tolist() == pytest.approx([0, 0.1 * (2**0.5 - 1), 0.1])
    # e = 0.2·0, 0.2·(0 + 1), 2 + 0.2·(0 + 1), over the last
    assert layer_dropout.exit_weights(3, 0.2).tolist() == pytest.approx([0, 0.2 / 2.2, 1])


def test_an_early_exit_says_more_after_it_was_trained(tiny_target) -> None:
    def exit_perplexity(methods) -> float:
        model = load(tiny_target, num_layers=3)
        train(model, methods, num_epochs=2)
        model.config.num_hidden_layers = 2  # the forward pass ends after so many
        return perplexity(score(model, documents()))

    settings = layer_dropout.Params(exit_scale=1, rotation=1)
    assert exit_perplexity([settings]) < 0.8 * exit_perplexity([])


def test_gates_start_at_the_probability_that_was_asked_for() -> None:
    gate = layer_skip_gate.Gate(8, start=0.7, speed=10, rng=torch.Generator().manual_seed(0))
    probability, memory = gate(torch.randn(3, 8), None)
    assert probability.tolist() == pytest.approx([0.7] * 3)
    assert memory[0].shape == (3, layer_skip_gate.WIDTH)


@pytest.mark.slow
def test_the_dearer_a_block_the_more_are_skipped_and_the_fewer_flops_run(tiny_target) -> None:
    shares, flops = [], []
    for cost_weight in (0.0, 10.0):
        model = load(tiny_target)
        with counted(model) as cost:
            trained = train(model, [layer_skip_gate.Params(cost_weight=cost_weight, start=0.8, speed=50)])
        shares.append(trained.figures["skipped_layer_share"])
        flops.append(cost.flops)
    assert shares[0] < 0.3 and shares[1] > shares[0] + 0.1
    assert flops[1] < flops[0]


def test_what_a_block_adds_is_scaled_by_the_probability_with_which_it_ran(tiny_target) -> None:
    settings = {"cost_weight": 0, "start": 0.5, "floor": 0.01, "speed": 1e-3}  # gates that hardly learn
    folded, left = load(tiny_target), load(tiny_target)
    train(folded, [layer_skip_gate.Params(**settings)], num_epochs=1)
    train(left, [layer_skip_gate.Params(**settings, fold=False)], num_epochs=1)
    for name, weight in left.state_dict().items():
        scale = 0.505 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        assert torch.allclose(scale * weight, folded.state_dict()[name], atol=2e-3), name


def kept(probability: float, num_steps: int, seed: int = 0) -> list[bool]:
    params = minibatch_drop.Params(probability=probability)
    regime = minibatch_drop.Hooks(params, torch.Generator().manual_seed(seed))
    regime.start(torch.nn.Module(), num_steps)
    return [regime.runs(step) for step in range(num_steps)]


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.8])
def test_the_share_that_runs_is_that_which_was_asked_for(probability: float) -> None:
    # 5 standard errors of a coin tossed 10,000 times: a right one fails under another seed once in 1.7 million.
    error = (probability * (1 - probability) / 10_000) ** 0.5
    assert sum(kept(probability, 10_000)) / 10_000 == pytest.approx(1 - probability, abs=5 * error)


def test_another_seed_leaves_out_other_steps() -> None:
    assert kept(0.5, 64, seed=1) == kept(0.5, 64, seed=1) != kept(0.5, 64, seed=2)


def test_steps_that_are_left_out_are_counted_and_learn_nothing(tiny_target) -> None:
    model: PreTrainedModel = load(tiny_target)
    whole = train(load(tiny_target), [])
    trained = train(model, [minibatch_drop.Params()])
    assert trained.num_steps + trained.num_skipped == whole.num_steps
    assert trained.num_tokens < whole.num_tokens
    assert [step for step, _ in trained.losses] != list(range(trained.num_steps))


def test_a_run_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(ValueError, match="probability 0.999999 leaves out all 3 steps"):
        kept(0.999999, 3)


def test_with_paged_moments_what_is_learnt_is_the_same_to_the_last_bit_and_they_are_counted(tiny_target: Path) -> None:
    paged, plain = load(tiny_target), load(tiny_target)
    trained = train(paged, [paged_state.Params()])
    train(plain, [])
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, paged.get_parameter(name)), name
    assert trained.figures["paged_mib"] == pytest.approx(8 * plain.num_parameters() / 2**20)


def test_moments_lie_in_a_file_that_has_no_name_any_more(model: PreTrainedModel, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    regime = paged_state.Hooks(validate(paged_state.Params, {"folder": str(tmp_path)}, "r"), torch.Generator())
    regime.hold(optimizer)
    model(torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    optimizer.step()
    moments = [state[part] for state in optimizer.state.values() for part in ("exp_avg", "exp_avg_sq")]
    mapped = {moment.untyped_storage().data_ptr() for moment in moments}
    assert len(mapped) == 1 and all(float(moment.abs().sum()) > 0 for moment in moments[:2])
    [file] = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert int(file.split("-")[0], 16) == mapped.pop() and file.endswith("(deleted)")
    assert list(tmp_path.iterdir()) == []
