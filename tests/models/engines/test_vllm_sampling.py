"""Tokens that are drawn by shared noise follow the target, whatever the draft, and are kept as often as can be told."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, LogitsProcessors, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from models.engines.vllm.patches import sampling
from models.engines.vllm.patches.sampling import Noise
from models.verify import coupled
from tests.models.verify.law import NUM_BLOCKS, P3, P_VALUE, Q2

SIZE, K = P3[0].shape[-1], len(Q2)
See = Callable[[Noise], Noise]


def noise_of(num: int, seed: int, temperature: float) -> Noise:
    rng = torch.Generator().manual_seed(seed)
    seeds, positions = torch.randint(-(2**62), 2**62, (num,), generator=rng), torch.arange(num) % 4096
    return Noise(seeds, positions, torch.full((num,), temperature))


def speculate(draft_sees: See = lambda noise: noise, target_sees: See = lambda noise: noise) -> tuple[Tensor, Tensor]:
    """Return blocks of K + 1 tokens and the drafts [NUM_BLOCKS, K], by the noise that each is told of."""
    current_platform.register_triton_kernel_overrides()
    noise = Noise(torch.arange(NUM_BLOCKS), torch.full((NUM_BLOCKS,), 7), torch.ones(NUM_BLOCKS))
    drafted, prefix = [], torch.zeros(NUM_BLOCKS, dtype=torch.int64)
    laws = [P3[0][prefix]]
    for place in range(K):
        drafted.append(draft_sees(noise.after([place])).draw(Q2[place][prefix].log()))
        prefix = prefix * SIZE + drafted[-1]
        laws.append(P3[place + 1][prefix])
    tokens = torch.stack(drafted, dim=1)
    counts, logits = [K] * NUM_BLOCKS, torch.stack(laws[:-1], dim=1).flatten(0, 1).log().float()
    seen = target_sees(noise.after([K]))
    last = seen.draw(laws[-1].log())[:, None]
    ends = torch.arange(1, NUM_BLOCKS + 1).mul(K).int()
    settings: Any = SimpleNamespace(generators=seen)
    own: Any = None
    blocks = sampling.verify(own, tokens.flatten(), counts, K, ends, None, logits, last, settings).long()
    block = torch.zeros(NUM_BLOCKS, dtype=torch.int64)
    for place in range(K + 1):  # what was not verified comes in the next step
        next_token = seen.after([place - K]).draw(P3[place][block].log())
        block = block * SIZE + torch.where(blocks[:, place] < 0, next_token, blocks[:, place])
    return block, blocks


def law_p_value(block: Tensor) -> float:
    joint = P3[0].flatten()
    for table in P3[1:]:
        joint = (joint[:, None] * table).flatten()
    counts = torch.bincount(block, minlength=len(joint))
    return float(chisquare(counts.double(), NUM_BLOCKS * joint / joint.sum()).pvalue)


def num_kept(blocks: Tensor) -> float:
    return float(((blocks >= 0).sum(dim=1) - 1).double().mean())


def expected_kept() -> float:
    """Return how many of a chain's tokens are kept on average, over all prefixes that both may draw."""
    first = coupled.both(P3[0], Q2[0])[0]
    return float(first.sum() + (first[:, None] * coupled.both(P3[1], Q2[1])).sum())


def test_blocks_follow_the_target_and_drafts_are_kept_as_often_as_both_draw_one_token() -> None:
    block, blocks = speculate()
    assert law_p_value(block) > P_VALUE
    assert num_kept(blocks) == pytest.approx(expected_kept(), abs=0.01)  # 4.5 standard errors


def test_a_draft_that_is_told_of_anothers_noise_changes_no_token_and_is_kept_less() -> None:
    block, _ = speculate()
    other, blocks = speculate(draft_sees=lambda noise: noise._replace(seeds=noise.seeds + 1))
    assert torch.equal(other, block)
    assert num_kept(blocks) < expected_kept() - 0.05


BUGS: dict[str, See] = {
    "one position's noise for all": lambda noise: noise._replace(positions=noise.positions * 0),
    "one request's noise for all": lambda noise: noise._replace(seeds=noise.seeds * 0),
}


@pytest.mark.parametrize("sees", BUGS.values(), ids=BUGS)
def test_noise_that_is_used_twice_breaks_the_law(sees: See, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Noise.draw
    monkeypatch.setattr(Noise, "draw", lambda self, *args: draw(sees(self), *args))
    block, _ = speculate()
    assert law_p_value(block) < P_VALUE


@pytest.mark.parametrize("temperature", [0.0, 2e-5, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("num_tokens", [1, 7, 300, 49152])
def test_the_compiled_draw_is_the_one_that_is_written_out(num_tokens: int, temperature: float) -> None:
    assert sampling._is_built()
    noise, rng = noise_of(16, num_tokens, temperature), torch.Generator().manual_seed(1)
    logits = (torch.randn(16, num_tokens, generator=rng) * 3).bfloat16().float()  # with ties
    logits[::2, : num_tokens // 2] = -torch.inf  # as top-p and grammars leave them
    token_ids = torch.randperm(num_tokens, generator=rng)
    for ids in (token_ids, torch.arange(num_tokens)):
        assert torch.equal(noise.draw(logits, ids), sampling.draw_by(logits, *noise, ids))


def test_no_logit_is_drawn_that_is_not_a_number() -> None:
    noise = noise_of(2, 0, 1.0)
    logits = torch.full((2, 300), torch.nan)
    assert {*noise.draw(logits).tolist()} <= {*range(300)}


def test_a_batchs_noise_is_its_requests_and_one_without_a_seed_has_one_of_its_own() -> None:
    asked = {"a": 5, "b": None, "c": None}
    requests = {name: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed)) for name, seed in asked.items()}
    settings = SimpleNamespace(all_greedy=False, temperature=torch.tensor([1.0, 0.5, 0.0]))
    batch = SimpleNamespace(req_ids=[*asked], num_reqs=3, sampling_metadata=settings)
    batch.num_tokens_no_spec = torch.tensor([4, 9, 2, 0]).numpy()
    runner = SimpleNamespace(requests=requests, input_batch=batch)
    first, again = Noise.of(runner), Noise.of(runner)
    assert first is not None and again is not None
    assert first.positions.tolist() == [4, 9, 2]
    assert first.seeds.tolist() == again.seeds.tolist()
    assert first.seeds[0] == 5 and len({*first.seeds.tolist()}) == 3
    assert first.over([2, 0, 1]).positions.tolist() == [4, 5, 2]
    settings.all_greedy = True
    assert Noise.of(runner) is None


def step(
    runner: Any, logits: Tensor, settings: SamplingMetadata, drafted: Sequence[Sequence[int]] | None = None
) -> list[list[int]]:
    """Return what vLLM's own runner samples of logits, of each sequence's drafted tokens and one behind them."""
    runner.input_batch.sampling_metadata, verified = settings, None
    if drafted is not None:
        verified = SpecDecodeMetadata.make_dummy([[*row] for row in drafted], torch.device("cpu"))
        behind = verified.cu_num_sampled_tokens.long() - 1
        verified.bonus_logits_indices = behind
        verified.target_logits_indices = torch.tensor([row for row in range(len(logits)) if row not in behind.tolist()])
    emitted = GPUModelRunner._sample(runner, logits, verified).sampled_token_ids
    return RejectionSampler.parse_output(emitted, logits.shape[1])[0]


def settings_of(temperatures: Tensor, limits: dict[str, float], **others: Any) -> SamplingMetadata:
    num, is_greedy = len(temperatures), not temperatures.any()
    settings: dict[str, Any] = {
        "temperature": None if is_greedy else temperatures,
        "all_greedy": is_greedy,
        "all_random": False,
        "top_p": torch.full((num,), limits["top_p"]) if "top_p" in limits else None,
        "top_k": torch.full((num,), int(limits["top_k"])) if "top_k" in limits else None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.empty(0),
        "presence_penalties": torch.empty(0),
        "repetition_penalties": torch.empty(0),
        "output_token_ids": [[]] * num,
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**settings | others)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_a_step_that_verifies_says_what_plain_steps_say(limits: dict[str, float], greedy: bool) -> None:
    sampling.install()
    current_platform.register_triton_kernel_overrides()
    num, size, temperatures = 3, 300, torch.tensor([0.7, 0.0, 1.0]) * (not greedy)
    settings = settings_of(temperatures, limits)
    sampler = Sampler()
    names = ["a", "b", "c"]
    batch = SimpleNamespace(req_ids=names, num_reqs=num, num_tokens_no_spec=np.array([5, 6, 7, 0]))
    batch.update_async_output_token_ids = lambda: None
    runner: Any = SimpleNamespace(
        input_batch=batch,
        requests={name: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed)) for seed, name in enumerate(names)},
        sampler=sampler,
        rejection_sampler=RejectionSampler(sampler),
        use_async_scheduling=False,
        _get_spec_decode_draft_probs=lambda metadata: None,
    )
    for seed in range(20):
        logits = torch.randn(4, num, size, generator=torch.Generator().manual_seed(seed)) * 2  # by place
        plain = []
        for rows in logits:
            plain.append([row[0] for row in step(runner, rows.clone(), settings)])
            batch.num_tokens_no_spec = batch.num_tokens_no_spec + 1
        said = [[*one] for one in zip(*plain, strict=True)]
        batch.num_tokens_no_spec = batch.num_tokens_no_spec - len(logits)
        drafted = [said[0][:3], [], [said[2][0], said[2][1] ^ 1]]
        rows = torch.cat([logits[:4, 0], logits[:1, 1], logits[:3, 2]])
        assert step(runner, rows, settings, drafted) == [said[0], said[1][:1], said[2][:2]]
        batch.num_tokens_no_spec = batch.num_tokens_no_spec + 1


IN_USE = {"MinTokensLogitsProcessor": "min_toks", "LogitBiasLogitsProcessor": "biases"}


class Budget:
    def __init__(self, num: int) -> None:
        self.num = num

    def has_tracked_requests(self) -> bool:
        return self.num > 0


ASKED: dict[str, tuple[dict[str, Any], bool]] = {
    "nothing": ({}, True),
    "log probability": ({"max_num_logprobs": 0}, False),
    "log probabilities of tokens": ({"logprob_token_ids": {0: [1]}}, False),
    "penalties": ({"no_penalties": False}, False),
    "bad words": ({"bad_words_token_ids": {0: [[1]]}}, False),
    "allowed tokens": ({"allowed_token_ids_mask": torch.ones(1, 4, dtype=torch.bool)}, False),
    "a budget": ({"thinking_budget_state_holder": Budget(1)}, False),
    "nobody's budget": ({"thinking_budget_state_holder": Budget(0)}, True),
    "a draw": ({"temperature": torch.ones(1), "all_greedy": False}, False),
}


@pytest.mark.parametrize(("asked", "reads_logits_only"), ASKED.values(), ids=ASKED)
def test_what_a_request_asks_for_beside_its_likeliest_tokens_is_left_to_vllm(
    asked: dict[str, Any], reads_logits_only: bool
) -> None:
    assert sampling._reads_logits_only(settings_of(torch.zeros(1), {}, **asked)) == reads_logits_only


@pytest.mark.parametrize("kind", [MinTokensLogitsProcessor, LogitBiasLogitsProcessor])
def test_a_processor_of_logits_in_use_is_left_to_vllm(kind: Any) -> None:
    processor = kind(SimpleNamespace(), torch.device("cpu"), False)
    settings = settings_of(torch.zeros(1), {}, logitsprocs=LogitsProcessors([processor]))
    assert sampling._reads_logits_only(settings)
    getattr(processor, IN_USE[kind.__name__])[0] = {}
    assert not sampling._reads_logits_only(settings)
    unknown: Any = SimpleNamespace()
    settings.logitsprocs.non_argmax_invariant[0] = unknown
    assert not sampling._reads_logits_only(settings)


LIMITS = [(None, 0.95), (None, 0.01), (20, None), (20, 0.5), (1, 0.5), (1000, 0.999), (None, 1.0)]


def sorts(*args: Any) -> Tensor:
    raise AssertionError(args)


@pytest.mark.parametrize(("k", "p"), LIMITS)
@pytest.mark.parametrize("size", [1, 7, 1000, 49152])
def test_as_much_is_kept_without_sorting_as_with_it(size: int, k: int | None, p: float | None) -> None:
    assert sampling._is_built()
    scales = torch.tensor([[0.01, 1, 3, 9, 30]]).T
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)) * scales
    logits[::2] = logits[::2].bfloat16().float()  # with ties
    logits[1, : size // 2] = -torch.inf
    ks = None if k is None else torch.tensor([k, size, k, k, k]).clamp(max=size).int()
    ps = None if p is None else torch.tensor([p, p, p, 1.0, p])
    told = sampling.keep_likeliest(sorts, logits.clone(), ks, ps)
    sorted_by_vllm = apply_top_k_top_p_pytorch(logits.clone(), None if ks is None else ks.clone(), ps, True)
    kept = told > -torch.inf
    assert torch.equal(told[kept], logits[kept])
    probs = logits.softmax(-1, dtype=torch.float64)
    masses = (probs * kept).sum(1), (probs * (sorted_by_vllm > -torch.inf)).sum(1)
    assert torch.allclose(*masses, rtol=0, atol=1e-4)  # vLLM adds in 32 bits
    least, most = logits.where(kept, torch.inf).amin(1), logits.where(~kept, -torch.inf).amax(1)
    assert (least >= most).all()


def test_of_equally_likely_tokens_the_first_are_kept() -> None:
    kept = sampling.keep_likeliest(sorts, torch.zeros(2, 1000), None, torch.tensor([0.0105, 0.5005])) == 0
    assert kept.sum(1).tolist() == [11, 501]
    assert kept[0, :11].all() and kept[1, :501].all()


def test_a_step_without_noise_is_vllms_own() -> None:
    settings: Any = SimpleNamespace(generators={})
    told = sampling.verify(lambda *args, **options: (args, options), 1, [], 0, 2, 3, 4, 5, settings, mode=6)  # type: ignore[arg-type]
    assert told == ((1, [], 0, 2, 3, 4, 5, settings), {"mode": 6})
