"""What drafts that are the target itself share: one cache, of which nothing is read that the target did not write."""

import asyncio
from pathlib import Path

import torch

from models.core.drafting.drafters import SelfDrafter
from models.core.drafting.self_draft import read_aside
from models.core.layers.decoder import Begun, Cache, Decoder, Sublayers
from models.drafts import early_exit
from models.engines.torch import Params, TorchEngine
from tests.models.drafts.answered import GREEDY, prompts
from tests.models.drafts.hollow import make_hollow

NONE = frozenset[int]()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(3, 67, (count,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_what_is_read_aside_leaves_the_cache_as_it_was(tiny_target: Path) -> None:
    decoder = Decoder.load(tiny_target, torch.float32)
    cache = Cache(decoder, 30)
    states, _ = decoder.forward(tokens(20), cache)
    before = cache.keys.clone(), cache.values.clone()
    whole = read_aside(decoder, tokens(20)[12:], cache, 12, Sublayers(NONE, NONE))
    torch.testing.assert_close(whole, states[12:], rtol=1e-4, atol=1e-4)
    part = read_aside(decoder, tokens(20)[12:], cache, 12, Sublayers(frozenset({1}), NONE))
    assert (part - whole).abs().max() > 0.1
    assert cache.length == 20
    assert torch.equal(cache.keys, before[0])
    assert torch.equal(cache.values, before[1])


class Counting(Decoder):
    """Notes which rows went through which layers."""

    seen: list[tuple[int, int]]

    def _project(self, layer: object, state: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.seen.append((self._layers.index(layer), len(state)))
        return super()._project(layer, state, *rest)


def test_no_row_of_the_shared_layers_is_computed_twice(tmp_path: Path) -> None:
    """All is accepted: layers 2 and 3 add nothing. Each of the shared layers sees each position of the text once."""
    make_hollow(tmp_path, 4, {2, 3}, {2, 3})
    decoder = Counting.load(tmp_path, torch.float32)
    assert isinstance(decoder, Counting)
    decoder.seen = []
    draft = early_exit.create(early_exit.Params(exit_layer=2), tmp_path, None)
    [prompt] = prompts(1)
    settings = GREEDY.model_copy(update={"max_tokens": 13})

    async def answer() -> tuple[tuple[int, ...], tuple[int, ...]]:
        engine = TorchEngine(decoder, tmp_path, draft, None, Params(num_draft_tokens=3))
        found = await engine.generate(prompt, settings, "0")
        return found.drafted, found.accepted

    assert asyncio.run(answer()) == ((3, 3, 3), (3, 3, 3))
    rows = [sum(count for number, count in decoder.seen if number == layer) for layer in range(4)]
    assert rows == [len(prompt) + 12] * 4  # the text's last token is read by nobody


def test_a_drafter_hands_on_the_layers_that_are_whole(tiny_target: Path) -> None:
    draft = early_exit.create(early_exit.Params(exit_layer=1), tiny_target, None)
    drafter = draft.drafter(30)
    assert isinstance(drafter, SelfDrafter)
    with torch.inference_mode():
        drafter.extend(tokens(10), torch.zeros(9, 0))
        assert drafter.begun() is None
        drafter.propose(3, lambda logits: (int(logits.argmax()), None))
        begun = drafter.begun()
        assert isinstance(begun, Begun)
        assert (begun.num_layers, len(begun.states)) == (1, 3)
        drafter.expand([5], [-1], [-1, 0])
        assert drafter.begun() is None
