"""Every draft family and tree in the reference engine: the output is that without a draft, also at the edges."""

import asyncio
from itertools import product
from pathlib import Path

import pytest
import torch

from models import catalog
from models.core.drafting.draft_families import family_named, is_trained
from models.core.drafting.proposal import Proposal
from models.drafts import Draft, Draw, GoOn, Unrolled
from models.engines import Completion, Sampling
from models.engines.torch import Params, TorchEngine
from tests.models.drafts.answered import GREEDY, answer_all, prompts, require_equal
from tests.models.drafts.tiny import make_tiny, save_tiny
from tests.models.engines.sampled import P_VALUE, sampled_p_value, started
from tests.models.pairs.forms import chosen

FAMILIES = catalog.names("drafts")
EXPANDING = [
    *("chimera", "clover", "dflash", "dream", "eagle", "eagle3", "early_exit", "falcon", "hydra", "lm", "medusa"),
    *("parallel_eagle", "prompt_tokens", "rag_draft", "self_skip"),
]
# New ones say what chance has it; trained ones are accepted in tests/models/drafts/test_learning.py.
BY_CHANCE = ["chimera", "dream", "falcon"]
TREES = [name for name in catalog.names("trees") if catalog.load("trees", name).BRANCHES]
SAMPLED = sorted({*EXPANDING, "jacobi", "kangaroo", "token_recycling"} - {"eagle3", "lm"})
GROWN = chosen(list(product(TREES, EXPANDING)), lambda _: False)
ASKED = prompts(2) + prompts(1)  # one comes again, which some families learn from


def make(name: str, target: Path, texts: list[Completion] | None = None) -> Draft:
    family = family_named(name)
    draft = make_tiny(family, target)
    if texts and hasattr(family, "collect"):
        family.collect(draft, [[*one.prompt_ids, *one.token_ids] for one in texts])
    return draft


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[Completion]:
    return answer_all(tiny_target, None, ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_draft_tokens", [1, 6])
def test_greedy_output_is_that_without_a_draft(
    tiny_target: Path, plain: list[Completion], name: str, num_draft_tokens: int
) -> None:
    draft = make(name, tiny_target, plain[:1])
    answers = answer_all(tiny_target, draft, ASKED, num_draft_tokens=num_draft_tokens)
    require_equal(answers, plain)
    assert 0 < max(max(one.drafted) for one in answers) <= num_draft_tokens


def start(target: Path, directory: Path, dtype: str) -> TorchEngine:
    return asyncio.run(TorchEngine.start(target, directory, Params(dtype=dtype, num_draft_tokens=3)))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_of_a_directory_drafts_in_either_format_and_keeps_its_weights(
    tiny_target: Path, plain: list[Completion], tmp_path: Path, name: str
) -> None:
    family = family_named(name)
    directory = save_tiny(family, tiny_target, tmp_path)
    for dtype in ("bfloat16", "float32"):
        engine = start(tiny_target, directory, dtype)
        answers = [asyncio.run(engine.generate(prompt, GREEDY, "0")) for prompt in ASKED]
        assert sum(sum(one.drafted) for one in answers) > 0 or not is_trained(family)
        assert asyncio.run(engine.check_draft(directory)) == 0.0
    require_equal(answers, plain)


def test_a_draft_multiplies_in_the_engines_format(tiny_target: Path, tmp_path: Path) -> None:
    for name in ("eagle3", "lm"):
        (tmp_path / name).mkdir()
    head = save_tiny(family_named("eagle3"), tiny_target, tmp_path / "eagle3")
    model = save_tiny(family_named("lm"), tiny_target, tmp_path / "lm")
    said = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        draft = start(tiny_target, head, name).loaded
        said[dtype] = draft.say(torch.linspace(-1, 1, draft.config["hidden_size"])[None])[1]
        assert start(tiny_target, model, name).loaded.decoder().dtype == dtype
    torch.testing.assert_close(said[torch.bfloat16], said[torch.float32], rtol=0.02, atol=0.02)
    assert not torch.equal(said[torch.bfloat16], said[torch.float32])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), GROWN)
def test_greedy_output_with_a_grown_tree_is_that_without_a_draft(
    tiny_target: Path, plain: list[Completion], name: str, family: str
) -> None:
    answers = answer_all(tiny_target, make(family, tiny_target), ASKED, num_draft_tokens=7, trees={"name": name})
    require_equal(answers, plain)
    assert {drafted for one in answers for drafted in one.drafted} <= set(range(8))
    assert sum(sum(one.accepted) for one in answers) > 0 or family in BY_CHANCE


@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.slow
def test_sampled_tokens_follow_the_target(tiny_target: Path, name: str) -> None:
    assert sampled_p_value(tiny_target, make(name, tiny_target)) > P_VALUE


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("room", [1, 3])
def test_a_prompt_that_nearly_fills_the_context_gets_the_tokens_that_fit(
    tiny_target: Path, name: str, room: int
) -> None:
    prompt = (prompts(1)[0] * 4)[: 32 - room]
    (answer,) = answer_all(tiny_target, make(name, tiny_target), [prompt], num_draft_tokens=5, max_model_len=32)
    (alone,) = answer_all(tiny_target, None, [prompt], max_model_len=32)
    assert answer.token_ids == alone.token_ids
    assert (len(answer.token_ids), answer.finish_reason) == (room, "length")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
async def test_with_no_tokens_to_draft_every_step_is_a_plain_one(
    tiny_target: Path, plain: list[Completion], name: str
) -> None:
    async with started(tiny_target, make(name, tiny_target), num_draft_tokens=0) as engine:
        assert not engine.speculating
        await engine.set_speculation(True)
        answer = await engine.generate(ASKED[0], GREEDY, "0")
    assert answer.token_ids == plain[0].token_ids
    assert set(answer.drafted) == {0}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in EXPANDING])
def test_a_tree_for_a_family_that_can_not_expand_is_refused(tiny_target: Path, family: str) -> None:
    with pytest.raises(ValueError, match="can't go on from any node of a tree"):
        answer_all(tiny_target, make(family, tiny_target), prompts(1), trees={"name": "dynamic"})


@pytest.mark.parametrize("family", ["eagle3", "parallel_eagle", "dflash"])
def test_a_head_that_reads_layers_that_the_target_lacks_is_refused(tiny_target: Path, family: str) -> None:
    draft = make(family, tiny_target)
    draft.config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 9]
    with pytest.raises(ValueError, match="reads what layer 9 of the target puts out, which has 2 layers"):
        answer_all(tiny_target, draft, prompts(1))


class Greedy(Draft):
    """Proposes more than it was asked for."""

    taps = ()
    vocabulary = torch.arange(259)

    def unroll(self, *args: object) -> list[Unrolled]:
        raise NotImplementedError

    def drafter(self, max_len: int) -> "Greedy":
        return self

    def extend(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> None:
        pass

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        return Proposal.chain([5] * 40)


def test_a_tree_larger_than_the_cache_is_an_error_that_says_so(tiny_target: Path) -> None:
    with pytest.raises(ValueError, match="9 tokens and 41 more; the cache holds 19"):
        answer_all(tiny_target, Greedy(), [prompts(2)[1]], Sampling(max_tokens=6), num_draft_tokens=3)
