from models.lengths import fixed


def test_whatever_was_accepted_the_length_is_k() -> None:
    assert [fixed.num_draft_tokens([(3, a)] * 9, 3, fixed.Params()) for a in (0, 3)] == [3, 3]
