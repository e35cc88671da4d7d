import pytest

from tasks.measure.speed import OURS, OVER_STOCK, PAIR, _chosen, _Host, judge
from tasks.measure.stock import PLAIN

HOSTS = {name: _Host(lambda stage: [], 1) for name in (OURS, PLAIN, "vLLM with ngram", "offline")}


def test_every_peer_is_asked_unless_some_are_named() -> None:
    assert list(_chosen(HOSTS, ())) == list(HOSTS)
    assert list(_chosen(HOSTS, ("vLLM with ngram",))) == [OURS, PLAIN, "vLLM with ngram"]


@pytest.mark.parametrize("name", ["vLLM with ngrams", OURS, PLAIN])
def test_a_peer_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f'no peer "{name}"'):
        _chosen(HOSTS, (name,))


def test_peers_that_were_not_asked_are_not_judged() -> None:
    ratio = {"overall": {"value": 1.5, "low": 1.4, "high": 1.6}}
    peer = {"pair_over_it": {"overall": {"value": 0.9, "low": 0.8, "high": 1.0}}}
    sides = {PAIR: dict.fromkeys(OVER_STOCK, ratio), "vLLM with ngram": peer}
    assert judge({"code": sides}) == (
        "code: 1.50× vLLM without a draft (aim 2), 1.50× over whole requests, behind vLLM with ngram."
    )
