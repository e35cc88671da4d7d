"""Which domains are judged, and against what."""

from models.gate import Params
from models.paired import Score
from tasks.gate_draft import judge_floors


def scores(accepted: float, *domains: str) -> list[Score]:
    return [Score(id=domain, domain=domain, steps=10, accepted=accepted) for domain in domains]


def test_each_domain_is_held_to_its_own_best_draft():
    best = {"chat": scores(5.0, "chat", "code"), "code": scores(8.0, "chat", "code")}
    floors = judge_floors(best, scores(8.0, "chat", "code"), Params(num_resamples=100), seed=0)
    assert {domain: floor.best for domain, floor in floors.items()} == {"chat": 1.5, "code": 1.8}
    assert {domain: floor.tau for domain, floor in floors.items()} == {"chat": 1.8, "code": 1.8}


def test_a_domain_without_conversations_here_is_not_judged():
    past = scores(5.0, "chat")
    assert judge_floors({"chat": past, "code": past}, past, Params(num_resamples=100), seed=0).keys() == {"chat"}
