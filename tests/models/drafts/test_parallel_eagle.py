import json
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from models.drafts import Rows, parallel_eagle
from tests.models.drafts.tiny import make_tiny, require_refused, save_tiny

TINY = {"vocab_size": 64}
make = partial(make_tiny, parallel_eagle)


def rows_of(hidden: torch.Tensor, token_ids: torch.Tensor, **more: torch.Generator) -> Rows:
    index = torch.arange(hidden.shape[1])
    return Rows(hidden, token_ids, torch.zeros_like(index), index, **more)


def test_later_places_read_neither_the_tokens_that_came_nor_what_was_drafted(tiny_target: Path) -> None:
    draft = make(tiny_target)
    hidden = torch.randn(1, 4, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    token_ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    changed = torch.tensor([[5, 6, 7, 8, 9, 20, 21, 22]])  # the last row's later tokens
    one, other = (draft.unroll(rows_of(hidden, ids), 3) for ids in (token_ids, changed))
    assert all(torch.equal(a.logits[-1], b.logits[-1]) for a, b in zip(one, other, strict=True))
    last = torch.stack([step.logits[-1] for step in one])
    assert not torch.allclose(last[1], last[2])  # places are told apart


def test_the_first_place_is_an_eagle3_heads_and_the_later_ones_hang_on_the_learnt_vector(tiny_target: Path) -> None:
    draft = make(tiny_target)
    hidden = torch.randn(1, 4, draft.fc.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows_of(hidden, torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]]))
    before = draft.unroll(rows, 3)
    with torch.no_grad():
        draft.mask_hidden.neg_()
    after = draft.unroll(rows, 3)
    assert [torch.equal(a.logits, b.logits) for a, b in zip(before, after, strict=True)] == [True, False, False]


def test_all_places_cost_one_pass(tiny_target: Path) -> None:
    draft = make(tiny_target)
    passes: list[int] = []
    draft.layer["self_attn"]["o_proj"].register_forward_hook(lambda module, given, out: passes.append(len(out)))
    drafter = draft.drafter(40)
    with torch.inference_mode():
        drafter.extend(torch.arange(3, 13), torch.randn(9, draft.fc.in_features))
        drafter.propose(6, lambda logits: (int(draft.vocabulary[logits.argmax()]), None))
        one, other = drafter.expand([5, 6], [-1, -1], [0, 1])
    assert passes == [6]
    assert torch.equal(one, other)


def test_in_training_each_place_keeps_its_share_of_the_rows_but_never_fewer_than_the_least(tiny_target: Path) -> None:
    draft = make(tiny_target)
    hidden = torch.randn(1, 100, draft.fc.in_features)
    rows = rows_of(hidden, torch.full((1, 110), 5), rng=torch.Generator().manual_seed(0))
    unrolled = draft.unroll(rows, 7)
    assert [len(step.running) for step in unrolled] == [100, 70, 49, 34, 24, 20, 20]
    for earlier, later in pairwise(unrolled):
        assert set(later.running.tolist()) <= set(earlier.running.tolist())
    assert [len(step.running) for step in draft.unroll(rows._replace(rng=None), 7)] == [100] * 7


def test_a_directory_is_in_the_layout_of_vllms_parallel_drafting(tiny_target: Path, tmp_path: Path) -> None:
    save_tiny(parallel_eagle, tiny_target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    draft = parallel_eagle.load(tmp_path, tiny_target)
    assert (config["architectures"], config["ptd_token_id"]) == (["Eagle3LlamaForCausalLM"], 258)
    assert draft.state_dict()["mask_hidden"].shape == (1, draft.fc.in_features)


@pytest.mark.parametrize("token", [259, -1, None, "pad"])
def test_a_mask_that_is_no_token_of_the_targets_is_refused(tiny_target: Path, tmp_path: Path, token: object) -> None:
    message = f"the mask must be a token of 0 to 258, the target's; got {token}"
    require_refused(parallel_eagle, tiny_target, tmp_path, message, ptd_token_id=token)
