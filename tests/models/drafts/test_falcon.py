from pathlib import Path

import numpy as np
import pytest
import torch

from models.core.checkpoints.loading import read_tensor
from models.drafts import Rows, falcon
from tests.models.drafts.tiny import library_layer, make_tiny


def make(target: Path, **changes: object) -> falcon.Falcon:
    plain = falcon.create(falcon.Params(**{"vocab_size": 64, **changes}), target, np.ones(259))
    return plain if changes else make_tiny(falcon, target)


def batch(draft: falcon.Falcon, length: int, num_sequences: int = 1, **more: object) -> Rows:
    """Return every row of random texts whose states end two tokens before the text does."""
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_sequences, length, 128, generator=rng)
    token_ids = torch.randint(0, 64, (num_sequences, length + draft.per_pass + 2), generator=rng)
    index = torch.arange(length - 2).repeat(num_sequences)
    return Rows(hidden, token_ids, torch.arange(num_sequences).repeat_interleave(length - 2), index, **more)


@pytest.mark.parametrize("per_pass", [1, 3])
def test_a_pass_is_the_librarys_layer_over_its_lstm_whose_last_rows_see_each_other(tiny_target, per_pass) -> None:
    draft = make(tiny_target, tokens_per_pass=per_pass)
    rows = batch(draft, 9)
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[:, 1:7]]
    with torch.inference_mode():
        read, _ = draft.lstm(torch.cat([embedded, draft.combine(rows.hidden[:, :6])], dim=-1))
        wanted = library_layer(draft, read[0], normed=False, together=per_pass)
        drafted = draft.unroll(rows, per_pass)
    found = torch.stack([step.hidden[5] for step in drafted if step.hidden is not None])
    torch.testing.assert_close(found, wanted[-per_pass:], rtol=1e-4, atol=1e-4)


def test_a_pass_drafts_k_tokens_and_a_tree_takes_one_for_k_levels(tiny_target: Path) -> None:
    draft = make(tiny_target)
    passes: list[int] = []
    draft.layers[0].self_attn.o_proj.register_forward_hook(lambda module, given, out: passes.append(len(out)))
    drafter = draft.drafter(40)
    with torch.inference_mode():
        drafter.extend(torch.arange(3, 13), torch.randn(9, 128))
        drafter.propose(5, lambda logits: (int(draft.vocabulary[logits.argmax()]), None))
        assert passes == [1, 1, 1]
        drafter.extend(torch.arange(12, 14), torch.randn(1, 128))
        tokens, parents = [5, 6, 7, 8, 9, 10, 11], [-1, -1, 0, 0, 1, 2, 2]
        root, one, other = drafter.expand(tokens, parents, [-1, 0, 1])
        assert passes[3:] == [1]  # what follows a first token is there already
        assert torch.equal(one, other)
        assert not torch.allclose(root, one)
        first, second, third = drafter.expand(tokens, parents, [2, 3, 4])
        assert passes[4:] == [3]  # the three paths of two tokens, in one pass
        assert not torch.allclose(first, second)
        assert not torch.allclose(first, third)
        drafter.expand(tokens, parents, [5, 6])
        assert len(passes) == 5


def test_training_runs_rows_that_end_blocks_of_k_and_every_row_in_its_turn(tiny_target: Path) -> None:
    draft = make(tiny_target, tokens_per_pass=3)
    met = set()
    for seed in range(20):
        drafted = draft.unroll(batch(draft, 12, rng=torch.Generator().manual_seed(seed)), 3)
        running = drafted[0].running
        assert set(running.diff().tolist()) == {3}
        assert all(torch.equal(step.running, running) for step in drafted)
        met |= set(running.tolist())
    assert met == set(range(10))


@pytest.mark.parametrize(("per_pass", "done", "share"), [(2, 0.0, 0.45), (3, 0.5, 0.275), (3, 1.0, 0.1)])
def test_a_share_of_the_wrong_tokens_is_shown_at_the_beginnings_of_blocks(tiny_target, per_pass, done, share) -> None:
    draft = make(tiny_target, tokens_per_pass=per_pass, noise=0.0)
    rows = batch(draft, 200, num_sequences=2, done=done)
    ends = (rows.index % per_pass == per_pass - 1).nonzero()[:, 0]
    features, following = draft.combine(rows.hidden), rows.token_ids[:, 1:201]
    with torch.no_grad():
        plain = draft.unroll(rows, per_pass)
    came = [rows.token_ids[rows.sequence, rows.index + 2 + step] for step in range(per_pass)]
    shown, tokens = draft.glance(rows, features, following, ends, torch.Generator().manual_seed(0))
    for number in range(2):
        wrong = sum(
            int((draft.vocabulary[step.logits.argmax(-1)] != token)[ends][rows.sequence[ends] == number].sum())
            for step, token in zip(plain, came, strict=True)
        )
        changed = (shown[number] != features[number]).any(-1).nonzero()[:, 0]
        assert share * wrong - per_pass < len(changed) <= share * wrong + per_pass
        places = changed % per_pass
        assert set(places.tolist()) == set(range(per_pass - 1))
        if per_pass == 3:  # a second one only behind a first one
            assert {int(place) - 1 for place in changed[places == 1]} <= set(changed.tolist())
        assert torch.equal(shown[number, changed], features[number, changed + per_pass])
        assert torch.equal(tokens[number, changed], rows.token_ids[number, changed + 1 + per_pass])


def test_a_draft_that_is_right_is_shown_nothing(tiny_target: Path) -> None:
    draft = make(tiny_target, noise=0.0)
    rows = batch(draft, 40)
    features, following = draft.combine(rows.hidden), rows.token_ids[:, 1:41]
    said = draft.vocabulary[draft.say(torch.zeros(1, 128))[1].argmax(-1)]
    with torch.no_grad():  # whatever it reads, it says the token of the first row of its output matrix
        for parameter in (*draft.lstm.parameters(), draft.layers[0].mlp.down_proj.weight):
            parameter.zero_()
    ends = (rows.index % 2 == 1).nonzero()[:, 0]
    right = rows._replace(token_ids=torch.full_like(rows.token_ids, int(said)))
    shown, tokens = draft.glance(right, features, following, ends, torch.Generator().manual_seed(0))
    assert torch.equal(shown, features)
    assert torch.equal(tokens, following)
    wrong = rows._replace(token_ids=torch.full_like(rows.token_ids, int(said) + 1))
    assert not torch.equal(
        draft.glance(wrong, features, following, ends, torch.Generator().manual_seed(0))[0], features
    )
