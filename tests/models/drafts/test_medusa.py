from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from models import catalog
from models.core.checkpoints.readout import output_embedding
from models.drafts import hydra, medusa
from tests.models.drafts.tiny import save_tiny

TINY = {"vocab_size": 64, "num_heads": 4}
SERVED = {"vocab_size": 0, "num_heads": 3}


def test_a_head_by_hand() -> None:
    """h = [3, 4] / √12.5 = [0.8485, 1.1314], W₁ = [[1, 0], [0, 0]], b = [0, 1]; SiLU(x) = x / (1 + e⁻ˣ)."""
    config = {"hidden_size": 2, "vocab_size": 3, "truncated_vocab_size": 3, "num_heads": 1, "num_hidden_layers": 1}
    draft = medusa.Medusa(config)
    with torch.no_grad():
        draft.blocks[0].layers[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        draft.blocks[0].layers[0].bias.copy_(torch.tensor([0.0, 1.0]))
        draft.lm_heads[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        hidden, logits = draft.say(0, draft.normed(torch.tensor([[3.0, 4.0]])), torch.tensor([[1]]))
    first = 0.848528 + 0.848528 / (1 + np.exp(-0.848528))
    second = 1.131371 + 1 / (1 + np.exp(-1.0))
    torch.testing.assert_close(hidden, torch.tensor([[first, second]], dtype=torch.float32))
    torch.testing.assert_close(logits, torch.tensor([[first, second, first + second]], dtype=torch.float32))


@pytest.mark.parametrize("family", [hydra, medusa])
def test_new_heads_say_what_the_target_said_at_their_state(tiny_target: Path, family: ModuleType) -> None:
    draft = family.create(family.Params(**TINY), tiny_target, np.arange(259))
    state = draft.normed(torch.randn(3, 128, generator=torch.Generator().manual_seed(0)))
    wanted = state @ output_embedding(tiny_target)[195:].T
    for head in range(4):
        torch.testing.assert_close(draft.say(head, state, torch.zeros(3, head + 1, dtype=torch.int64))[1], wanted)


def test_siblings_have_equal_children_because_no_head_reads_what_was_drafted(tiny_target: Path) -> None:
    drafter = medusa.create(medusa.Params(**TINY), tiny_target, np.arange(259)).drafter(20)
    drafter.extend(torch.arange(3, 8), torch.randn(4, 128))
    one, other = drafter.expand([200, 201], [-1, -1], [0, 1])
    assert torch.equal(one, other)


def test_no_heads_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads"):
        medusa.Params(num_heads=0)


def test_vllm_serves_as_many_heads_as_tokens_are_drafted_of_the_whole_vocabulary(
    tiny_target: Path, tmp_path: Path
) -> None:
    vllm = catalog.load("engines", "vllm")

    def require(params: medusa.Params, k: int, **ways: object) -> None:
        vllm.require_draft(params, vllm.Params(num_draft_tokens=k, **ways))

    require(medusa.Params(vocab_size=0), 4)
    with pytest.raises(ValueError, match=r"got 4 heads for 3 tokens: set num_heads = 3 in \[draft\]"):
        require(medusa.Params(vocab_size=0), 3)
    with pytest.raises(ValueError, match=r"say every token of the target's vocabulary, this one 4096: set vocab_size"):
        require(medusa.Params(), 4)
    for ways in ({"lookup": {"num_tokens": 4}}, {"lengths": {"name": "fixed"}}, {"draft_sample_method": "greedy"}):
        with pytest.raises(ValueError, match=f'key "{next(iter(ways))}" would do nothing, since vLLM drafts the same'):
            require(medusa.Params(vocab_size=0), 4, **ways)
    whole, part = (save_tiny(medusa, tiny_target, tmp_path / str(served), served=served) for served in (True, False))
    assert medusa.vllm_config(whole)["num_speculative_tokens"] == 3
    with pytest.raises(ValueError, match="say every token of the target's 259, this one 64"):
        medusa.vllm_config(part)
