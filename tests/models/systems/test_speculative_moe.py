from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.core.layers.decoder import WideDecoder
from models.systems import Given, speculative_moe
from models.systems.speculative_moe import Layer, Routed
from tests.models.systems import planted

DEVICES, EXPERTS = 4, speculative_moe.NUM_EXPERTS


def test_rows_that_are_sent_are_counted_by_hand() -> None:
    homes = torch.tensor([0, 0, 1, 1])
    chosen = torch.tensor([[0, 1], [0, 2], [2, 3], [3, 2]])
    # The first token needs device 0 alone, the second both, the others device 1, to which each goes once.
    assert speculative_moe.sent(chosen, homes, torch.tensor([0, 0, 1, 1]), 2).tolist() == [[0, 1], [0, 0]]
    assert speculative_moe.sent(chosen, homes, torch.tensor([1, 1, 0, 0]), 2).tolist() == [[0, 2], [2, 0]]


def test_tokens_get_the_device_that_they_want_most_while_there_is_room() -> None:
    wanted = torch.tensor([[2.0, 0.0], [1.5, 0.5], [1.9, 0.1], [0.0, 2.0]])
    assert speculative_moe.place(wanted).tolist() == [0, 1, 0, 1]  # the second loses least elsewhere


@pytest.mark.parametrize("num_tokens", [1, 3, 8, 41])
def test_every_device_has_as_many_tokens_up_to_one(num_tokens: int) -> None:
    wanted = torch.rand(num_tokens, DEVICES, generator=torch.Generator().manual_seed(0))
    for places in (speculative_moe.place(wanted), speculative_moe.in_order(num_tokens, DEVICES)):
        counts = places.bincount(minlength=DEVICES)
        assert counts.sum() == num_tokens and counts.max() - counts.min() <= 1


def routed(num_tokens: int, seed: int, foreseen: bool) -> Routed:
    """Tokens of 4 kinds whose two experts are those of their kind, far apart in number, or any at all."""
    rng = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(DEVICES, (num_tokens,), generator=rng)
    if not foreseen:
        return Routed(token_ids, torch.rand(2, num_tokens, EXPERTS, generator=rng).topk(2).indices)
    member = torch.randint(2, (2, num_tokens), generator=rng) * 2 * DEVICES
    return Routed(token_ids, torch.stack([token_ids + member, token_ids + member + DEVICES], dim=-1))


def test_experts_of_the_same_tokens_lie_together() -> None:
    homes = speculative_moe.group(routed(200, 0, True), 0, DEVICES)
    for kind in range(DEVICES):
        assert len(set(homes[kind::DEVICES].tolist())) == 1
    assert homes.bincount().tolist() == [EXPERTS // DEVICES] * DEVICES


def rows_sent(profile: Routed, served: Routed, layer: int, shuffled: bool) -> int:
    homes = speculative_moe.group(profile, layer, DEVICES)
    wanted = speculative_moe.expected(profile, served, layer) @ torch.nn.functional.one_hot(homes).float()
    places = speculative_moe.place(wanted) if shuffled else speculative_moe.in_order(len(wanted), DEVICES)
    return int(speculative_moe.sent(served.chosen[layer], homes, places, DEVICES).sum())


def test_routes_that_follow_from_the_token_send_nothing_but_what_finds_no_room() -> None:
    served = routed(400, 1, True)
    over = int((served.token_ids.bincount() - 100).clamp(min=0).sum())
    assert rows_sent(routed(200, 0, True), served, 0, True) == over < 30
    assert rows_sent(routed(200, 0, True), served, 0, False) > 250


def test_routes_that_nothing_tells_of_are_sent_as_ever() -> None:
    profile, served = routed(400, 0, False), routed(2000, 1, False)
    shuffled, plain = (rows_sent(profile, served, 0, one) for one in (True, False))
    assert shuffled == pytest.approx(plain, rel=0.05)


def test_a_token_that_was_never_seen_is_expected_to_go_on_from_its_expert_as_others_did() -> None:
    chosen = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
    profile, new = Routed(torch.tensor([10, 11]), chosen), Routed(torch.tensor([99]), chosen[:, 1:])
    likely = speculative_moe.expected(profile, new, 1)[0]
    assert likely[[6, 7]].tolist() == [1, 1] and float(likely.sum()) == 2
    assert speculative_moe.expected(profile, new, 0)[0, :4].tolist() == [0.5] * 4


def experts(width: int) -> Layer:
    rng = torch.Generator().manual_seed(0)
    return Layer(torch.randn(EXPERTS, width, 8, generator=rng), torch.randn(EXPERTS, 8, width, generator=rng))


def plainly(layer: Layer, states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    outputs = torch.zeros_like(states)
    for token, (numbers, shares) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(numbers, shares, strict=True):
            hidden = torch.nn.functional.silu(states[token] @ layer.up[expert])
            outputs[token] += share * (hidden @ layer.down[expert])
    return outputs


def test_where_tokens_and_experts_are_changes_no_output() -> None:
    rng = torch.Generator().manual_seed(1)
    states, weights = torch.randn(30, 6, generator=rng), torch.rand(30, 2, generator=rng)
    chosen = torch.rand(30, EXPERTS, generator=rng).topk(2).indices
    wanted = plainly(experts(6), states, chosen, weights)
    for seed in range(3):
        drawn = torch.Generator().manual_seed(seed)
        homes, places = (torch.randint(DEVICES, (number,), generator=drawn) for number in (EXPERTS, 30))
        found = speculative_moe.compute(experts(6), states, chosen, weights, homes, places, DEVICES)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_study_keeps_all_outputs_and_is_seeded(tiny_target: Path) -> None:
    given = Given(WideDecoder.load(tiny_target, torch.float32), [[7, 11, 13, 2], [5, 9, 30, 4]], 12, planted.EASY)
    one, again = (speculative_moe.study(given, torch.Generator().manual_seed(0)) for _ in range(2))
    assert one.kept == 1 and one.gain > 1
    assert one.holds == again.holds
