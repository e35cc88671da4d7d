import asyncio
from pathlib import Path

import torch

from models.core.drafting.self_draft import read_aside
from models.core.layers.decoder import Cache, Decoder, Sublayers
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
    assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])


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
