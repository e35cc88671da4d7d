from models.lengths import View, fixed
from models.throughput.cost import Cost


def test_whatever_was_accepted_the_length_is_k() -> None:
    views = [View(limit=3, position=40, steps=((3, accepted),) * 9, num_running=1, cost=Cost()) for accepted in (0, 3)]
    assert [fixed.num_draft_tokens(view, fixed.Params()) for view in views] == [3, 3]
