"""Ways to run a model on several devices or in batches: times by hand, equal outputs, and studies that may fail."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.core.layers.decoder import Cache, WideDecoder
from models.core.throughput.cost import Cost, Time
from models.systems import Given, Times, easyspec, flover, skipdecode, speculative_moe
from models.systems.flover import Answer, Request
from models.systems.speculative_moe import Layer, Routed
from models.targets import random

PROMPTS = [[7, 11, 13, 2], [5, 9, 30]]


def times(
    attention_ms: dict[int, float], mlp_ms: dict[int, float], rest_ms: float, meet_ms: float, row_ms: float = 0.0
) -> Times:
    """Return times whose whole pass takes its parts' at one row, and so much more for each further row."""
    one = attention_ms[1] + mlp_ms[1] + rest_ms
    cost = Cost.measured([Time(1, rows, 0, one + (rows - 1) * row_ms) for rows in (1, 2, 16)])
    return Times(cost, attention_ms, mlp_ms, rest_ms, meet_ms)


EASY = times({size: 8.0 / size for size in (1, 2, 3, 4)}, {size: 8.0 / size for size in (1, 2, 3, 4)}, 0.0, 0.0)


def eight_layers(directory: Path, idle: Sequence[int] = (), parts: Sequence[str] = ()) -> WideDecoder:
    """Return a random decoder, in some of whose layers some parts add nothing."""
    random.build(random.Params(num_layers=8), directory)
    if idle:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for layer in idle:
            for part in parts:
                model.model.layers[layer].get_submodule(part).weight.data.zero_()
        model.save_pretrained(directory)
    return WideDecoder.load(directory, torch.float32)


@pytest.fixture(scope="module")
def decoder(tiny_target: Path) -> WideDecoder:
    return WideDecoder.load(tiny_target, torch.float32)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> WideDecoder:
    return eight_layers(tmp_path_factory.mktemp("target"))


FLAT = dict.fromkeys((1, 2, 3, 4), 8.0)  # shared, it takes as long
HALVED = {size: 8.0 / size for size in (1, 2, 3, 4)}


def without_attention(directory: Path) -> WideDecoder:
    return eight_layers(directory, range(8), ["self_attn.o_proj"])


def test_easyspecs_times_are_known_by_hand() -> None:
    clock = times(HALVED, HALVED, rest_ms=1.0, meet_ms=0.1)
    assert easyspec.shared_ms(clock, 8, 1) == pytest.approx(17)  # 8 + 8 + 1, no meeting
    assert easyspec.shared_ms(clock, 8, 4) == pytest.approx(6.6)  # 2 + 2 + 1 + 16 meetings
    assert easyspec.at_once_ms(clock, 8, 4) == pytest.approx(6.0)  # 2 + 2 + 1 + 10 meetings
    # Five tokens of 6.6 against five of 6 and an exact pass of 6.6.
    assert easyspec.gain(clock, 8, 4, 5) == pytest.approx(33 / 36.6)
    flat = times(FLAT, HALVED, rest_ms=0.0, meet_ms=0.0)  # attentions that can't be shared
    assert easyspec.gain(flat, 8, 4, 5) == pytest.approx(5 * 10 / (5 * 4 + 10))
    assert easyspec.gain(EASY, 8, 4, 4) == pytest.approx(4 / 5)  # sharing is free


def test_an_exact_draft_is_accepted_whole_and_a_fuzzy_one_is_not(tmp_path: Path) -> None:
    decoder = eight_layers(tmp_path)
    assert easyspec.accepted(decoder, PROMPTS[0], 20, 1, 5) == 1
    assert easyspec.accepted(decoder, PROMPTS[0], 20, 8, 5) < 1


def test_attentions_that_add_nothing_leave_the_draft_exact(tmp_path: Path) -> None:
    assert easyspec.accepted(without_attention(tmp_path), PROMPTS[0], 20, 8, 5) == 1


def test_easyspecs_study_holds_both_halves_of_the_claim(tmp_path: Path) -> None:
    decoder, clock = without_attention(tmp_path), times(FLAT, HALVED, 0.0, 0.0)
    seen = easyspec.study(Given(decoder, PROMPTS, 10, clock), torch.Generator())
    assert seen.gain > 1 and seen.kept == 1 and seen.holds
    slow = easyspec.study(Given(decoder, PROMPTS, 10, EASY), torch.Generator())
    assert slow.gain < 1 and not slow.holds


FIRST = [7, 11, 13, 17]
SECOND = [5, 9, 30]


def a_second(num_sequences: int, num_tokens: int) -> float:
    """Each pass takes a second."""
    return 1.0


THREE = [Request(FIRST, 3, 0.0)] * 3
LATE = [Request(SECOND, 3, 1.5), Request(FIRST, 5, 0.0)]
IDLE = [Request(FIRST, 2, 0.0), Request(FIRST, 1, 100.0)]


@pytest.mark.parametrize(
    ("requests", "size", "fused", "wanted"),
    [
        (THREE, 1, False, [3, 6, 9]),
        (THREE, 3, False, [5, 5, 5]),  # three prompts, then two steps
        (THREE, 2, False, [4, 4, 7]),  # the third finds no room
        (LATE, 2, False, [6.5, 5]),
        (LATE, 2, True, [3.5, 6]),
        (IDLE, 2, True, [2, 1]),
    ],
    ids=["in turn", "a batch", "a smaller batch", "late for a batch", "late for what is fused", "nobody runs"],
)
def test_what_flovers_requests_take_by_hand(requests, size, fused, wanted) -> None:
    assert flover.seconds(requests, size, fused, a_second) == wanted


def test_a_pass_takes_what_its_shape_does() -> None:
    requests = [Request(FIRST, 2, 0.0), Request(SECOND, 2, 0.0)]
    # Prompts of 4 and of 3 tokens, then one step of two sequences.
    assert flover.seconds(requests, 2, True, lambda sequences, tokens: 10.0 * sequences + tokens) == [48, 48]


def test_fused_requests_say_what_each_says_alone(decoder: WideDecoder) -> None:
    requests = [Request([5 + number, *FIRST[: number + 1]], 12 - number, 1.3 * number) for number in range(4)]
    alone = [flover.serve(decoder, [request], 1, False, a_second)[0] for request in requests]
    fused = flover.serve(decoder, requests, 3, True, a_second)
    assert [answer.token_ids for answer in fused] == [answer.token_ids for answer in alone]
    assert [len(said.gaps) for said in alone] == [12, 11, 10, 9]
    for request, said in zip(requests, alone, strict=True):
        assert said.token_ids == plain(decoder, request)


def plain(decoder: WideDecoder, request: Request) -> list[int]:
    """Return what the decoder says when the whole text is read anew for each token."""
    text = list(request.prompt)
    for _ in range(request.num_tokens):
        states, _ = decoder.forward(torch.tensor(text), Cache(decoder, len(text)))
        text.append(int(decoder.logits(states[-1:]).argmax()))
    return text[len(request.prompt) :]


def test_an_output_may_part_at_a_near_tie_and_nowhere_else() -> None:
    request, said = Request(FIRST, 3, 0.0), Answer([5, 6, 7], [1.0, 1e-5, 1.0])
    assert flover._same(request, said, said)
    assert flover._same(request, said, said._replace(token_ids=[5, 9, 9]))
    assert not flover._same(request, said, said._replace(token_ids=[9, 6, 7]))


@pytest.mark.slow
@pytest.mark.parametrize(("at_eight", "holds"), [(2.0, True), (8.0, False)])
def test_flovers_verdict_follows_from_what_a_step_of_eight_rows_takes(decoder, at_eight, holds) -> None:
    """Where eight rows take as long as eight steps nothing is gained, so that the claim must not be seen."""

    def takes(num_sequences: int, num_tokens: int) -> float:
        return 1 + (at_eight - 1) * (num_sequences - 1) / 7

    given = Given(decoder, [FIRST, SECOND], 12, EASY)
    seen = [flover.compare(given, takes, torch.Generator().manual_seed(seed)) for seed in range(2)]
    assert [one.holds for one in seen] == [holds] * 2
    assert all((one.gain > 1.3) is holds and one.kept == 1 for one in seen)


def test_flovers_study_times_the_passes_of_this_machine(decoder: WideDecoder) -> None:
    given = Given(decoder, [FIRST, SECOND], 8, EASY)
    seen = flover.study(given, torch.Generator().manual_seed(0))
    assert seen.gain > 0 and seen.kept == 1


def test_skipdecodes_schedule_is_known_by_hand() -> None:
    assert skipdecode.schedule(8, 3, 0.75, 0.25, 1) == [(0, 3, 4, 5, 6, 7), (0, 5, 6, 7), (0, 7)]
    assert skipdecode.schedule(4, 2, 1.0, 1.0, 1) == [(0, 1, 2, 3)] * 2


@pytest.mark.parametrize(("num_layers", "num_tokens", "num_warm"), [(1, 2, 0), (2, 1, 1), (7, 40, 0), (30, 40, 1)])
def test_a_layer_runs_for_a_beginning_of_the_text_alone(num_layers: int, num_tokens: int, num_warm: int) -> None:
    layers = skipdecode.schedule(num_layers, num_tokens, 0.9, 0.1, num_warm)
    assert len(layers) == num_tokens
    for before, after in pairwise(layers):
        assert {*after} <= {*before}
    assert all(len(set(one)) == len(one) and num_layers - 1 in one for one in layers)


def test_by_skipdecode_all_layers_are_the_plain_way(deep: WideDecoder) -> None:
    layers = [tuple(range(8))] * 6
    together, _ = skipdecode.answer(deep, PROMPTS, layers)
    alone = [skipdecode.answer(deep, [prompt], layers)[0][0] for prompt in PROMPTS]
    assert together == alone
    again, _ = skipdecode.answer(deep, PROMPTS, layers, together)
    assert again == together


def test_a_model_whose_lower_layers_do_nothing_loses_nothing(tmp_path: Path) -> None:
    idle = eight_layers(tmp_path, range(1, 6), ["self_attn.o_proj", "mlp.down_proj"])
    layers = skipdecode.schedule(8, 10, 0.75, 0.375, 1)
    assert min(map(len, layers)) == 3
    whole, _ = skipdecode.answer(idle, PROMPTS, [tuple(range(8))] * 10)
    assert skipdecode.answer(idle, PROMPTS, layers)[0] == whole


def test_skipdecodes_study_of_an_untrained_model_keeps_little(deep: WideDecoder) -> None:
    seen = skipdecode.study(Given(deep, PROMPTS, 12, EASY), torch.Generator())
    assert seen.gain > 0 and seen.kept < 0.95 and not seen.holds


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


def test_speculative_moes_study_keeps_all_outputs_and_is_seeded(decoder: WideDecoder) -> None:
    given = Given(decoder, [[7, 11, 13, 2], [5, 9, 30, 4]], 12, EASY)
    one, again = (speculative_moe.study(given, torch.Generator().manual_seed(0)) for _ in range(2))
    assert one.kept == 1 and one.gain > 1
    assert one.holds == again.holds
