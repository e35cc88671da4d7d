"""The reference engine: greedy output is the library's, sampled output follows the target, every step is counted."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models import catalog
from models.core.drafting.draft_families import class_of, family_named
from models.core.drafting.proposal import Proposal
from models.core.drafting.sampling import probabilities
from models.core.layers.decoder import Cache, Decoder
from models.drafts import Draft, Draw, GoOn, Unrolled, eagle3
from models.engines import Completion, Sampling
from models.engines.torch.request import Request
from tests.conftest import make_draft
from tests.models.drafts.answered import GREEDY, prompts
from tests.models.drafts.tiny import make_tiny
from tests.models.engines.answers import answer_all, num_scored_alike, require_steps
from tests.models.engines.sampled import P_VALUE, sampled_p_value, started

pytestmark = pytest.mark.slow

BRANCHING = [name for name in catalog.names("drafts") if class_of(family_named(name)).branches]


async def answers(
    target: Path, draft: Path | Draft | None, asked: list[list[int]], sampling: Sampling = GREEDY, **changes: object
) -> list[Completion]:
    async with started(target, draft, **changes) as engine:
        return await answer_all(engine, asked, sampling, 1, "one")


@pytest.fixture(scope="module")
def library_outputs(tiny_target: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    outputs = []
    for prompt in prompts(10):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(GREEDY.max_tokens):
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=-1)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


async def test_the_first_token_is_told_of_once_and_before_the_others(tiny_target: Path, tiny_draft: Path) -> None:
    told: list[float] = []
    async with started(tiny_target, tiny_draft) as engine:
        completion = await engine.generate(prompts(1)[0], GREEDY, "1", lambda: told.append(time.monotonic()))
    ended_s = time.monotonic()
    assert len(told) == 1
    assert ended_s - told[0] > completion.per_token_ms / 1000


def require_the_librarys(outputs: list[Completion], wanted: list[list[int]]) -> None:
    """Fail where an answer differs from the library's otherwise than at a near tie."""
    for ids, output in zip(wanted, outputs, strict=True):
        pairs = enumerate(zip(ids, output.token_ids, strict=True))
        different = next((place for place, (one, other) in pairs if one != other), None)
        assert different is None or output.gaps[different] < 1e-3
        assert output.finish_reason == "length"


@pytest.mark.parametrize("num_draft_tokens", [0, 5])
async def test_greedy_output_is_the_librarys_for_any_draft_length_0_included(
    tiny_target: Path, tiny_draft: Path, library_outputs: list[list[int]], num_draft_tokens: int
) -> None:
    changes = {"dtype": "float32", "num_draft_tokens": num_draft_tokens}
    async with started(tiny_target, tiny_draft, **changes) as engine:
        assert engine.speculating == (num_draft_tokens > 0)
        await engine.set_speculation(True)
        outputs = await answer_all(engine, prompts(10), GREEDY, 1, "any")
    require_the_librarys(outputs, library_outputs)
    assert {drafted for output in outputs for drafted in output.drafted} == {num_draft_tokens}


async def test_every_step_is_counted_and_scoring_without_an_engine_agrees(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    outputs = await answers(tiny_target, tiny_draft, prompts(20))
    require_steps(outputs)
    # The cached states are bfloat16, so near-ties of the draft may move a count.
    assert num_scored_alike(eagle3.load(tiny_draft, tiny_target), tiny_target, outputs, tmp_path) >= 18


def test_sampled_tokens_follow_the_target(tiny_target: Path, tiny_draft: Path) -> None:
    assert sampled_p_value(tiny_target, tiny_draft) > P_VALUE


class Bush(Draft):
    """Two branches at each of two levels: what the target would say, muddled, so that some of it is right.

    Of siblings the first one is the worse in greedy decoding, so that no accepted path is a chain's.
    """

    taps = (1, 2)
    vocabulary = torch.arange(259)

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.target = Decoder.load(target, torch.float32)
        self.muddle = torch.randn(259, generator=torch.Generator().manual_seed(0))

    def unroll(self, *args: object) -> list[Unrolled]:
        raise NotImplementedError

    def drafter(self, max_len: int) -> "BushDrafter":
        return BushDrafter(self, max_len)


class BushDrafter:
    """See `Bush`; keeps all that it was told."""

    parents = (-1, -1, 0, 0, 1, 1)

    def __init__(self, draft: Bush, max_len: int) -> None:
        self.draft, self.max_len = draft, max_len
        self.known: list[int] = []
        self.hidden: list[Tensor] = []

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        assert len(token_ids) == len(hidden) + 1
        self.known += token_ids.tolist()[1 if self.known else 0 :]
        self.hidden.append(hidden)

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        tokens: list[int] = []
        drawn_from: list[Tensor | None] = []
        for path in ([], [0], [1]):
            target = self.draft.target
            text = torch.tensor([*self.known, *(tokens[node] for node in path)])
            states, _ = target.forward(text, Cache(target, len(text)))
            logits = target.logits(states[-1:])[0]
            draws = [draw(logits / 2 + self.draft.muddle) for _ in range(2)]
            if draws[0][1] is None:
                draws = [(int(token), None) for token in logits.topk(2).indices.flip(0)]
            tokens += [token for token, _ in draws]
            drawn_from += [q for _, q in draws]
        chain = Proposal.chain(tokens, drawn_from)
        return Proposal(chain.token_ids, self.parents, chain.q)


@pytest.fixture(scope="module")
def bush(tiny_target: Path) -> Bush:
    return Bush(tiny_target)


async def test_greedy_output_of_a_tree_is_the_librarys(
    tiny_target: Path, bush: Bush, library_outputs: list[list[int]]
) -> None:
    outputs = await answers(tiny_target, bush, prompts(10), num_draft_tokens=6)
    require_the_librarys(outputs, library_outputs)
    for output in outputs:
        assert set(output.drafted) == {6}
        assert set(output.accepted[:-1]) == {2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_after_a_tree_the_cache_and_what_the_drafter_was_told_are_those_of_a_fresh_pass(
    tiny_target: Path, bush: Bush, temperature: float
) -> None:
    async with started(tiny_target, bush, num_draft_tokens=6) as engine:
        sequence = Request(engine, prompts(1)[0], GREEDY.model_copy(update={"temperature": temperature}), "1")
        while sequence.finish_reason is None:
            sequence.step()
    drafter, cache, completion = sequence._drafter, sequence._cache, sequence.completion()
    assert isinstance(drafter, BushDrafter)
    assert 0 < sum(completion.accepted) < sum(completion.drafted)
    text = [*completion.prompt_ids, *completion.token_ids]
    assert drafter.known[: len(text)] == text
    fresh = Cache(bush.target, len(drafter.known))
    with torch.inference_mode():
        _, tapped = bush.target.forward(torch.tensor(drafter.known[:-1]), fresh, bush.taps)
    torch.testing.assert_close(torch.cat(drafter.hidden), tapped, rtol=1e-3, atol=1e-3)
    assert cache.length == fresh.length
    for held, wanted in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        torch.testing.assert_close(held[:, :, : cache.length], wanted[:, :, : cache.length], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rule", ["rejection", "spectr"])
def test_sampled_tokens_of_a_tree_follow_the_target(tiny_target: Path, bush: Bush, rule: str) -> None:
    assert sampled_p_value(tiny_target, bush, num_draft_tokens=6, rule=rule) > P_VALUE


@pytest.mark.parametrize("rule", ["without_replacement", "multi_draft_optimal"])
async def test_a_tree_that_a_rule_can_not_verify_is_an_error_and_no_output(
    tiny_target: Path, bush: Bush, rule: str
) -> None:
    sampling = Sampling(temperature=1.0, seed=0, max_tokens=8, ignore_eos=True)
    with pytest.raises(ValueError, match=f"rule {rule} wants"):
        await answers(tiny_target, bush, prompts(1), sampling, verify={"name": rule})


@pytest.mark.parametrize("branches", [False, True])
def test_a_draft_that_lies_about_q_would_be_noticed(
    tiny_target: Path, tiny_draft: Path, bush: Bush, branches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "_spread", lambda self, drawn_from: torch.full((259,), 1 / 259))
    draft, num_draft_tokens = (bush, 6) if branches else (tiny_draft, 3)
    assert sampled_p_value(tiny_target, draft, num_draft_tokens) < P_VALUE


async def test_a_seed_repeats_an_answer(tiny_target: Path, tiny_draft: Path) -> None:
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7, max_tokens=16)
    first, second = await answers(tiny_target, tiny_draft, prompts(1) * 2, sampling)
    assert first.token_ids == second.token_ids


def test_top_k_and_top_p_keep_the_best() -> None:
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0]]).log()
    torch.testing.assert_close(
        probabilities(logits, Sampling(temperature=1.0, top_k=2)), torch.tensor([[4 / 7, 3 / 7, 0, 0]])
    )
    torch.testing.assert_close(
        probabilities(logits, Sampling(temperature=1.0, top_p=0.6)), torch.tensor([[4 / 7, 3 / 7, 0, 0]])
    )
    with pytest.raises(ValueError, match="temperature must be above 0"):
        probabilities(logits, Sampling())


async def test_a_swap_while_requests_run_changes_the_drafted_tokens_and_no_output(
    tiny_target: Path, tiny_draft: Path, library_outputs: list[list[int]], tmp_path: Path
) -> None:
    other = make_draft(tiny_target, tmp_path, seed=5)
    async with started(tiny_target, tiny_draft, dtype="float32") as engine:
        running = asyncio.gather(*(engine.generate(p, GREEDY, str(i)) for i, p in enumerate(prompts(10))))
        await asyncio.sleep(0.1)
        await engine.swap_draft(other, "2")
        assert await engine.check_draft(other) == 0.0
        with pytest.raises(ValueError, match="differs from"):
            await engine.check_draft(tiny_draft)
        during, after = await running, await answer_all(engine, prompts(10), GREEDY, 1, "after")
    for outputs in (during, after):
        equal = sum(list(o.token_ids) == wanted for o, wanted in zip(outputs, library_outputs, strict=True))
        assert equal >= 9
    assert {o.draft_version for o in after} == {"2"}
    alone = await answers(tiny_target, other, prompts(10), dtype="float32")
    assert [o.drafted_ids for o in after] == [o.drafted_ids for o in alone]


SPOILED: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "missing": lambda tensors: tensors.pop("fc.weight"),
    "shape": lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :-1].contiguous()}),
    "nan": lambda tensors: tensors["fc.weight"][0].fill_(float("nan")),
}


@pytest.mark.parametrize("fault", [*SPOILED, "garbage"])
async def test_a_spoiled_draft_is_refused_and_the_loaded_one_goes_on(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path, fault: str
) -> None:
    bad = make_draft(tiny_target, tmp_path, seed=1)
    file = bad / "model.safetensors"
    tensors = {name: one.clone() for name, one in load_file(file).items()}
    file.write_bytes(b"not safetensors")
    if fault in SPOILED:
        SPOILED[fault](tensors)
        save_file(tensors, file)
    async with started(tiny_target, tiny_draft) as engine:
        with pytest.raises(ValueError, match=r"fc\.weight|safetensors"):
            await engine.swap_draft(bad, "2")
        assert (engine.draft_version, engine.draft) == ("1", tiny_draft)
        after = await engine.generate(prompts(1)[0], GREEDY, "after")
    assert max(after.drafted) == 3


async def test_speculation_off_drafts_nothing(tiny_target: Path, tiny_draft: Path) -> None:
    async with started(tiny_target, tiny_draft, dtype="float32") as engine:
        await engine.set_speculation(False)
        off = await engine.generate(prompts(1)[0], GREEDY, "off")
        await engine.set_speculation(True)
        on = await engine.generate(prompts(1)[0], GREEDY, "on")
    assert (set(off.drafted), set(on.drafted)) == ({0}, {3})
    assert off.token_ids == on.token_ids
    async with started(tiny_target, None) as engine:
        with pytest.raises(ValueError, match="started without a draft"):
            await engine.set_speculation(True)


async def test_a_client_that_goes_away_is_told_of_once(tiny_target: Path, tiny_draft: Path) -> None:
    told: list[Completion] = []
    async with started(tiny_target, tiny_draft) as engine:
        engine.on_finish = lambda completion, _: told.append(completion)
        task = asyncio.create_task(engine.generate(prompts(1)[0], Sampling(max_tokens=900, ignore_eos=True), "gone"))
        while not engine.running or not next(iter(engine.running)).token_ids:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    (completion,) = told
    assert (completion.request_id, completion.finish_reason) == ("gone", None)


async def test_an_answer_ends_at_a_stop_token_and_what_came_after_it_is_not_accepted(
    tiny_target: Path, tmp_path: Path
) -> None:
    """The target's own greedy third token is made its stop token."""
    third = (await answers(tiny_target, None, prompts(1)))[0].token_ids[2]
    async with started(tiny_target, None) as engine:
        engine.stops = frozenset([third])
        answer = await engine.generate(prompts(1)[0], Sampling(max_tokens=24), "stop")
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == third
    assert third not in answer.token_ids[:-1]


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, "0 tokens; wanted 1 to 1023"),
        ([5] * 2000, {}, "2000 tokens"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"top_p": 0.0}, "top_p"),
        ([5], {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_a_request_out_of_range_is_refused(
    tiny_target: Path, prompt: list[int], sampling: dict[str, float], reason: str
) -> None:
    async with started(tiny_target, None) as engine:
        with pytest.raises(ValueError, match=reason):
            await engine.generate(prompt, Sampling(**sampling), "bad")


@pytest.mark.parametrize("family", BRANCHING)
async def test_a_rule_for_independent_siblings_is_refused_beside_a_draft_that_branches(
    tiny_target: Path, family: str
) -> None:
    draft = make_tiny(family_named(family), tiny_target)
    with pytest.raises(ValueError, match=f"{type(draft).__name__} proposes siblings that are certain; .* rule spectr"):
        await answers(tiny_target, draft, [], verify={"name": "spectr"})
