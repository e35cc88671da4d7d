from pathlib import Path
from types import ModuleType

import pytest
import torch

from models.core.checkpoints.checkpoint import read_tensor
from models.drafts import clover, hydra
from tests.models.drafts.tiny import make_tiny, rows_at

TINY = {"vocab_size": 64, "num_heads": 4}


def test_a_head_reads_the_state_and_then_the_tokens_in_their_order(tiny_target: Path) -> None:
    draft = make_tiny(hydra, tiny_target)
    embedding = read_tensor(tiny_target, "model.embed_tokens.weight").float()
    state = torch.arange(128.0)[None]
    read = draft.inputs(1, state, torch.tensor([[7, 5]]))
    assert torch.equal(read[0], torch.cat([state[0], embedding[7], embedding[5]]))
    assert [layer.layers[0].in_features for layer in draft.blocks] == [256, 384, 512, 640]


@pytest.mark.parametrize("family", [clover, hydra])
def test_what_a_head_says_hangs_on_the_tokens_before_and_on_no_later_one(tiny_target: Path, family: ModuleType) -> None:
    draft = make_tiny(family, tiny_target, scale=0.1)  # every part says something
    rows = rows_at(1)
    tokens = rows.token_ids.clone()
    tokens[0, 4] = (tokens[0, 4] + 1) % 259
    one, two = draft.unroll(rows, 4), draft.unroll(rows._replace(token_ids=tokens), 4)
    # Row 1 goes on from tokens 1 and 2: steps read 2; then 3; then the changed one, and one after it.
    assert [torch.equal(a.logits, b.logits) for a, b in zip(one, two, strict=True)] == [True, True, False, False]
