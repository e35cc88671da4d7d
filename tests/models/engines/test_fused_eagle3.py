"""All passes of a draft in one call say what vLLM's proposer says, which calls each from Python."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader import get_model
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.spec_decode.eagle import EagleProposer

from models.core.drafting.draft_families import family_of
from models.core.drafting.lookup import NgramIndex
from models.drafts import eagle3
from models.engines.vllm.fields import Passes, Row, StepPlan
from models.engines.vllm.patches import attention, small_batch_gemm
from models.engines.vllm.patches.fused_eagle3 import FusedDraft
from models.engines.vllm.patches.proposer import READS, Planned
from models.engines.vllm.patches.sampling import Noise
from models.engines.vllm.worker import DraftOnGrids
from models.lengths import Plan
from tests.conftest import make_draft
from tests.models.core.layers.published import build_on_grids

pytestmark = pytest.mark.engine

K, NUM_BLOCKS, LONGEST = 3, 24, 256
KEYS = 0.01  # how far keys may be apart, as a share of the largest: a rounding of bfloat16


# Tokens that the target computed of each sequence of a step, and how many it has with them: of a block's middle, of its
# border, and of what a whole step verified.
NEW, LENGTHS = (1, 4, 2, 1), (9, 64, 95, 33)


@dataclass
class Pair:
    """A target, vLLM's proposer with a draft for it, and that draft as one call."""

    config: Any
    target: Any
    drafter: Any
    fused: FusedDraft

    @property
    def cache(self) -> Tensor:
        """The draft's keys and values, which a proposal writes."""
        cache: Tensor = self.drafter.model.model.layers[0].self_attn.attn.kv_cache
        return cache


def config_of(target: Path, draft: Path, block_size: int = 32) -> Any:
    """Return the config of an engine of both."""
    drafting = {**family_of(draft).vllm_config(draft), "num_speculative_tokens": K}
    drafting |= {"draft_sample_method": "probabilistic", "disable_padded_drafter_batch": True}
    args = EngineArgs(
        model=str(target),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=LONGEST,
        max_num_seqs=16,
        block_size=block_size,
        speculative_config=drafting,
    )
    return args.create_engine_config()


def load(config: Any) -> Pair:
    """Load both as a worker does, and give the draft a cache that a seed fills."""
    target = get_model(vllm_config=config)
    drafter = EagleProposer(config, torch.device("cpu"))
    drafter.load_model(target)
    (name,) = drafter._draft_attn_layer_names
    model: Any = drafter.model
    layer = model.model.layers[0].self_attn.attn
    spec = layer.get_kv_cache_spec(config)
    shape = (NUM_BLOCKS, layer.num_kv_heads, spec.block_size, 2 * layer.head_size)
    layer.kv_cache = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    drafter.initialize_attn_backend(KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec([name], spec)]))
    fused = FusedDraft.of(drafter)
    assert fused is not None
    return Pair(config, target, drafter, fused)


def step_of(
    pair: Pair,
    new: Sequence[int] = NEW,
    lengths: Sequence[int] = LENGTHS,
    temperatures: Sequence[float] = (),
    seed: int = 0,
) -> dict[str, Any]:
    """Return what vLLM's `propose` gets for sequences in blocks that are scattered over the cache."""
    draw, num = torch.Generator().manual_seed(seed), sum(new)
    size, sizes = pair.drafter.block_size, pair.drafter.draft_model_config.hf_config
    needed = [-(-min(length + K, LONGEST) // size) for length in lengths]
    scattered = iter(torch.randperm(NUM_BLOCKS, generator=draw).tolist())
    blocks = torch.zeros(len(new), LONGEST // size, dtype=torch.int32)
    for row, count in enumerate(needed):
        blocks[row, :count] = torch.tensor([next(scattered) for _ in range(count)])
    positions = torch.cat([torch.arange(length - n, length) for n, length in zip(new, lengths, strict=True)])
    rows = torch.repeat_interleave(torch.arange(len(new)), torch.tensor(new))
    borders = torch.tensor([0, *new]).cumsum(0).int()
    greedy = not any(temperatures)
    return {
        "target_token_ids": torch.randint(sizes.vocab_size, (num,), generator=draw).int(),
        "target_positions": positions,
        "target_hidden_states": torch.randn(num, pair.drafter.model.model.fc_input_size, generator=draw).bfloat16(),
        "next_token_ids": torch.randint(sizes.vocab_size, (len(new),), generator=draw).int(),
        "token_indices_to_sample": None,
        "sampling_metadata": SimpleNamespace(
            all_greedy=greedy,
            all_random=all(temperatures) and not greedy,
            temperature=None if greedy else torch.tensor(temperatures),
        ),
        "common_attn_metadata": CommonAttentionMetadata(
            query_start_loc=borders,
            query_start_loc_cpu=borders,
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(new),
            num_actual_tokens=num,
            max_query_len=max(new),
            max_seq_len=max(lengths),
            block_table_tensor=blocks,
            slot_mapping=blocks[rows, positions // size] * size + positions % size,
        ),
    }


def by_vllm(pair: Pair, num_tokens: int, step: Mapping[str, Any]) -> Tensor:
    """Return what vLLM's proposer says, called as redraft's calls it."""
    metadata = step["common_attn_metadata"]
    copied = {**step, "common_attn_metadata": metadata.replace(seq_lens=metadata.seq_lens.clone())}
    tokens: Tensor = pair.drafter.propose(num_tokens, **copied)
    return tokens


def both(pair: Pair, num_tokens: int, step: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Return what both say, and how far apart the keys are that they wrote, as a share of the largest."""
    pair.cache.copy_(before := torch.randn(pair.cache.shape, generator=torch.Generator().manual_seed(1)))
    theirs = by_vllm(pair, num_tokens, step)
    wanted = pair.cache.clone()
    assert not torch.equal(wanted, before.bfloat16())
    pair.cache.copy_(before)
    proposal = pair.fused.propose(num_tokens, step, None)
    assert proposal is not None and (proposal[1] == 1).all()
    error = float((pair.cache.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    return proposal[0], theirs, error


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A target whose weights lie on grids, and two drafts for it."""
    target, first, second = (tmp_path_factory.mktemp(name) for name in ("target", "first", "second"))
    build_on_grids(target)
    return target, make_draft(target, first, seed=0), make_draft(target, second, seed=1)


@pytest.fixture(scope="module")
def pair(
    files: tuple[Path, Path, Path], request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A pair with blocks of 32 tokens, or of `request.param`, and the patches that a worker has."""
    own, limit = small_batch_gemm._target, small_batch_gemm.limit()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(attention, "_layers", attention._Layers())
        patch.setattr(small_batch_gemm, "_target", small_batch_gemm._Target())
        # On so few weights it is chance what is faster.
        patch.setattr(small_batch_gemm._Target, "_seconds", lambda _, rows, limit: 0.0 if limit else 1.0)
        current_platform.register_triton_kernel_overrides()
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
        attention.install()
        small_batch_gemm.install()
        torch.cpu._init_amx()
        config = config_of(*files[:2], getattr(request, "param", 32))
        stack.enter_context(set_current_vllm_config(config))
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('meet')}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
        stack.callback(cleanup_dist_env_and_memory)
        stack.enter_context(torch.inference_mode())
        yield load(config)
    own._set(limit)


def require_same(pair: Pair, num_tokens: int, step: Mapping[str, Any]) -> Tensor:
    """Fail unless both say the same tokens and write the same keys; return the tokens."""
    ours, theirs, error = both(pair, num_tokens, step)
    assert torch.equal(ours, theirs) and ours.shape == (len(step["next_token_ids"]), num_tokens)
    assert error < KEYS
    return ours


@pytest.mark.parametrize("pair", [32, 64, 128], indirect=True)
def test_sequences_of_unlike_lengths_get_the_tokens_and_keys_of_vllms_proposer(pair: Pair) -> None:
    for seed in range(4):
        require_same(pair, K, step_of(pair, seed=seed))
    for num_tokens in (0, 1):  # keys alone, and no pass after the first
        require_same(pair, num_tokens, step_of(pair, seed=4 + num_tokens))


@pytest.mark.parametrize(
    ("new", "lengths"),
    [((1, 2) * 4, (20, 41) * 4), ((1, 1), (LONGEST - 1, 40)), ((1, 1), (LONGEST, 40))],
    ids=["more than one thread drafts", "one token before the context's end", "at the context's end"],
)
def test_so_do_others(pair: Pair, new: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    require_same(pair, K, step_of(pair, new, lengths))


def test_a_sequence_that_begins_with_blocks_of_another_attends_to_their_keys(pair: Pair) -> None:
    step = step_of(pair)
    blocks = step["common_attn_metadata"].block_table_tensor
    blocks[2, :2] = blocks[1, :2]  # of both, the tokens of this step lie behind
    step["common_attn_metadata"].slot_mapping[1:5] = blocks[1, 2] * 32 + torch.arange(4)
    require_same(pair, K, step)


def test_a_draft_that_is_swapped_in_drafts_from_the_next_proposal_on(pair: Pair, files: tuple[Path, ...]) -> None:
    step = step_of(pair)
    before = require_same(pair, K, step)
    worker: Any = SimpleNamespace(
        vllm_config=pair.config,
        get_model=lambda: pair.target,
        get_draft_model=lambda: pair.drafter.model,
        model_runner=SimpleNamespace(drafter=pair.drafter),
    )
    weights = eagle3.vllm_weights(files[2])
    DraftOnGrids(worker).load(load_file(weights.file), weights.parameters)
    assert not torch.equal(require_same(pair, K, step), before)


def planned_for(pair: Pair, names: list[str], monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Put redraft's proposer before vLLM's, which is put back."""
    runner: Any = SimpleNamespace(**dict.fromkeys(READS), drafter=pair.drafter)
    greedy = SimpleNamespace(all_greedy=True, temperature=None)
    runner.input_batch = SimpleNamespace(req_ids=names, num_reqs=len(names), sampling_metadata=greedy)
    runner.requests = {name: SimpleNamespace(sampling_params=None) for name in names}
    runner.speculative_config = pair.config.speculative_config
    for name in ("propose", "_sample_draft_tokens"):
        monkeypatch.setattr(pair.drafter, name, getattr(pair.drafter, name))
    return Planned(runner, NgramIndex(shortest=3, longest=16, capacity=0))


def test_what_is_sampled_is_drawn_by_the_noise_of_its_place_in_one_call_as_in_calls_of_each_pass(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = planned_for(pair, ["a", "b"], monkeypatch)
    step = step_of(pair, (1, 4), (9, 64), temperatures=(1.5, 0.0))
    greedy, _, _ = both(pair, K, step_of(pair, (1, 4), (9, 64)))
    drawn = set()
    for seed in range(12):
        noise = Noise(torch.tensor([seed, seed]), torch.tensor([9, 64]), torch.tensor([1.5, 0.0]))
        proposal = pair.fused.propose(K, step, noise)
        assert proposal is not None
        ours, _ = proposal
        planned._noise = noise
        theirs = by_vllm(pair, K, step)
        assert torch.equal(ours, theirs)
        assert torch.equal(ours[1], greedy[1])
        drawn.add(tuple(ours[0].tolist()))
    assert len(drawn) > 6


def test_a_chains_chance_is_that_of_the_tokens_that_were_drawn(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, told = planned_for(pair, ["a", "b"], monkeypatch), list[Tensor]()
    step, draw = step_of(pair, (1, 4), (9, 64), temperatures=(1.5, 0.0)), Noise.draw

    def seen(noise: Noise, logits: Tensor, *args: Any) -> Tensor:
        drawn = draw(noise, logits, *args)
        law = (logits.float() / noise.temperatures.where(noise.temperatures > 0, 1)[:, None]).softmax(-1)
        told.append(law.gather(1, drawn[:, None])[:, 0])
        return drawn

    noise = Noise(torch.tensor([3, 3]), torch.tensor([9, 64]), torch.tensor([1.5, 0.0]))
    proposal = pair.fused.propose(K, step, noise, torch.zeros(2))
    assert proposal is not None
    planned._noise = noise
    monkeypatch.setattr(Noise, "draw", seen)
    assert torch.equal(by_vllm(pair, K, step), proposal[0])
    assert torch.allclose(proposal[1], torch.stack(told, dim=1).cumprod(dim=1), rtol=0.02)


def told_by_vllm(pair: Pair, step: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Return [B, K] the chances of vLLM's passes that all tokens up to each are right."""
    told, model = [], pair.drafter.model

    def likeliest(hidden: Tensor) -> Tensor:
        logits = model.logits_processor(model.lm_head, hidden).float()
        told.append(logits.softmax(-1).amax(-1))
        return logits.argmax(-1) + model.draft_id_to_target_id[logits.argmax(-1)]

    with monkeypatch.context() as patch:
        patch.setattr(pair.drafter, "_greedy_sample", likeliest)
        by_vllm(pair, K, step)
    return torch.stack(told, dim=1).cumprod(dim=1)


def test_a_chain_ends_behind_a_token_that_makes_it_unlikely_to_be_right(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = step_of(pair)
    whole, _, _ = both(pair, K, step)
    wanted = told_by_vllm(pair, step, monkeypatch)
    num, never = len(whole), torch.zeros(len(whole))
    told = pair.fused.propose(K, step, None, never)
    assert told is not None and torch.equal(told[0], whole)
    assert torch.allclose(told[1], wanted, rtol=0.02)
    for limits in (torch.full((num,), 2.0), told[1][:, 1] * 1.001, told[1][:, 1] * 0.999, torch.eye(num)[0] * 2):
        ended = pair.fused.propose(K, step, None, limits)
        assert ended is not None
        lengths = (told[1] >= limits[:, None]).cumprod(dim=1).sum(dim=1).add(1).clamp(max=K)
        drafted = torch.arange(K) < lengths[:, None]
        assert torch.equal(ended[0], whole.where(drafted, -1))
        assert torch.equal(ended[1][drafted], told[1][drafted])


def test_what_a_step_plans_is_drafted_so_whichever_sequences_a_pass_is_over(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c", "d"]
    step = step_of(pair)
    wanted = by_vllm(pair, K, step)
    planned = planned_for(pair, names, monkeypatch)
    planned._propose = None  # vLLM's is not asked
    plan = StepPlan(Plan(0), (Passes(K, frozenset("ac")), Passes(1, frozenset("bd"))), 0)
    rows = [Row.unpacked(row).token_ids for row in planned.propose(plan, **step)]
    assert rows == [row[:num].tolist() for row, num in zip(wanted, (K, 1, K, 1), strict=True)]


@pytest.mark.parametrize(("owner", "name"), [("drafter.model.model", "norm_output"), ("drafter", "parallel_drafting")])
def test_a_draft_that_is_computed_otherwise_stays_vllms(
    pair: Pair, owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attrgetter(owner)(pair), name, True, raising=False)
    assert FusedDraft.of(pair.drafter) is None


def test_a_vllm_of_another_layout_keeps_its_drafts_and_it_is_said(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(pair.drafter, "uses_mrope")
    assert FusedDraft.of(pair.drafter) is None
    assert "vLLM has another layout: 'EagleProposer' object has no attribute 'uses_mrope'" in caplog.text


def test_prompts_and_drafts_of_floats_stay_vllms(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    many = small_batch_gemm.limit() + 1
    assert pair.fused.propose(K, step_of(pair, (many,), (many,)), None) is None
    monkeypatch.delattr(pair.drafter.model.lm_head, small_batch_gemm.FORM)
    assert pair.fused.propose(K, step_of(pair), None) is None


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_each_pass_is_called_from_python_and_it_is_said(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    assert FusedDraft.of(pair.drafter) is None
    assert "each pass of the draft is called from Python" in caplog.text
