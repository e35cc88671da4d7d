from pathlib import Path

import numpy as np
import torch

from models.checkpoints.checkpoint import output_embedding, read_tensor
from models.drafts import Rows, hydra
from models.losses import cross_entropy

TINY = {"vocab_size": 64, "num_heads": 4}


def make(target: Path) -> hydra.Hydra:
    return hydra.create(hydra.Params(**TINY), target, np.arange(259))


def test_a_head_reads_the_state_and_then_the_tokens_in_their_order(tiny_target: Path) -> None:
    draft = make(tiny_target)
    embedding = read_tensor(tiny_target, "model.embed_tokens.weight").float()
    state = torch.arange(128.0)[None]
    read = draft.inputs(1, state, torch.tensor([[7, 5]]))
    assert torch.equal(read[0], torch.cat([state[0], embedding[7], embedding[5]]))
    assert [layer.layers[0].in_features for layer in draft.blocks] == [256, 384, 512, 640]


def test_new_heads_are_new_medusa_heads(tiny_target: Path) -> None:
    draft = make(tiny_target)
    state = draft.normed(torch.randn(3, 128, generator=torch.Generator().manual_seed(0)))
    wanted = state @ output_embedding(tiny_target)[195:].T
    for head in range(4):
        said = draft.say(head, state, torch.full((3, head + 1), 9))[1]
        torch.testing.assert_close(said, wanted)


def test_what_a_head_says_hangs_on_the_tokens_before_and_on_no_later_one(tiny_target: Path) -> None:
    draft = make(tiny_target)
    with torch.no_grad():
        for block in draft.blocks:
            block.residual.weight.normal_(generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10]])
    other = torch.tensor([[5, 6, 7, 8, 11, 10]])
    hidden = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(0))
    one, two = (
        draft.unroll(Rows(hidden, one, torch.tensor([0]), torch.tensor([1])), 4) for one in (tokens, other)
    )  # row 1 goes on from tokens 6, 7: steps read 7; 7, 8; 7, 8, then the changed one
    assert [torch.equal(a.logits, b.logits) for a, b in zip(one, two, strict=True)] == [True, True, False, False]


def test_all_heads_count_alike_in_training() -> None:
    assert hydra.Hydra.procedure == (cross_entropy.Params(), "all", 1.0)
