from pathlib import Path

import torch

from models.core.drafting.draft_families import family_named, open_draft
from models.core.learning.hidden import Sample, cut_ends, hidden_states, pack, usual_length
from tests.models.drafts.tiny import make_tiny


def test_drafts_that_read_other_layers_do_not_take_each_others_states(tiny_target: Path, tmp_path: Path) -> None:
    samples = [Sample("a", "tiny", [5, 6, 7], [8, 9, 10, 11])]
    drafts = [make_tiny(family_named(name), tiny_target) for name in ("medusa", "eagle3", "medusa")]
    # The last layer; one and two; found again.
    read = [hidden_states(draft, tiny_target, samples, tmp_path).read(samples[0])[0] for draft in drafts]
    first, between, again = read
    assert torch.equal(first, again)
    assert torch.equal(between[:, -128:], first)


def test_a_length_is_that_of_99_texts_in_100_but_a_batch_at_least() -> None:
    texts = [Sample(f"s{size}", "tiny", [1], [2] * size) for size in range(100)]  # of 1 to 100 tokens
    assert [usual_length(texts, batch_tokens) for batch_tokens in (64, 512)] == [99, 512]
    assert usual_length(texts[::-1] + texts, 64) == 99
    assert [usual_length(some, 64) for some in (texts[97:], texts[99:], [])] == [99, 100, 64]


def test_what_is_behind_a_length_is_cut_and_what_has_no_answer_before_it_left_out() -> None:
    texts = [
        Sample("whole", "tiny", [1, 2], [3, 4, 5], rejected=[2]),
        Sample("cut", "tiny", [1], [2, 3, 4, 5, 6, 7], rejected=[1, 3, 4]),
        Sample("asked", "tiny", [1, 2, 3], [4, 5, 6], rejected=[0]),
        Sample("longer", "tiny", [1] * 9, [2, 3, 4]),
    ]
    whole, cut = cut_ends(texts, 5)
    assert whole == texts[0]
    assert cut == texts[1]._replace(completion_ids=[2, 3, 4, 5], rejected=[1, 3])


def test_a_row_is_a_token_after_which_one_would_draft(tiny_target: Path, tiny_draft: Path, tmp_path: Path) -> None:
    draft = open_draft(tiny_draft, tiny_target)
    samples = [Sample("long", "tiny", [5, 6, 7], [8, 9, 10, 11]), Sample("short", "tiny", [5, 6], [7, 8, 9])]
    states = hidden_states(draft, tiny_target, samples, tmp_path)
    rows, final, log_sums, lengths = pack(samples, states, num_steps=2, draft=draft)
    # The first drafted token follows the answer's first, and the last is the answer's last.
    assert (rows.sequence.tolist(), rows.index.tolist()) == ([0, 0, 0, 1, 1], [2, 3, 4, 1, 2])
    assert rows.token_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 0, 0, 0], [5, 6, 7, 8, 9, 0, 0, 0, 0, 0]]
    assert lengths.tolist() == [7, 5]
    width = states.hidden_size
    assert [rows.hidden.shape, final.shape] == [(2, 7, len(draft.taps) * width), (2, 7, width)]
    assert log_sums.shape == (2, 7)
    assert not final[1, 5:].any()
    assert torch.equal(final[1, :5], states.read(samples[1])[0][:, -width:].float())
