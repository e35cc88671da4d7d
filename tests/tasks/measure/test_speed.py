import pytest

from tasks.measure.speed import FIRST, OFF, OURS, PAIR, _chosen, _Host, unequal
from tasks.measure.stock import PLAIN

HOSTS = {name: _Host(lambda stage: [], 1) for name in (OURS, PLAIN, "vLLM with ngram", "offline")}


def test_every_peer_is_asked_unless_some_are_named() -> None:
    assert list(_chosen(HOSTS, ())) == list(HOSTS)
    assert list(_chosen(HOSTS, ("vLLM with ngram",))) == [OURS, PLAIN, "vLLM with ngram"]


@pytest.mark.parametrize("name", ["vLLM with ngrams", OURS, PLAIN])
def test_a_peer_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'no baseline "{name}"'):
        _chosen(HOSTS, (name,))


def test_an_answer_that_differs_from_that_without_speculation_by_one_token_is_a_failure() -> None:
    plain = [{"prompt_id": str(number), "token_ids": [1, 2, number]} for number in range(3)]
    other = [plain[0], {"prompt_id": "1", "token_ids": [1, 2, 9]}, plain[2]]
    assert unequal({PAIR: plain, OFF: plain, FIRST: plain}) == []
    assert unequal({PAIR: other, OFF: plain}) == [f"{PAIR}: 1 outputs are not those with speculation off"]
    assert unequal({PAIR: plain, OFF: plain, FIRST: other}) == [
        f"{FIRST}: 1 outputs are not those with speculation off"
    ]
