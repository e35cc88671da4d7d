"""Which domains are judged, and against what."""

from infra.registry import Version
from models.gate import Score
from models.hidden import Sample
from tasks.gate_draft import best_taus, judgeable


def samples(**sizes: int) -> list[Sample]:
    return [Sample(f"{domain}{number}", domain, [1], [2]) for domain, size in sizes.items() for number in range(size)]


def test_a_new_domain_too_small_to_judge_is_left_out_and_named():
    kept, left_out = judgeable(samples(chat=9, code=8, stray=2), known={"chat"}, min_conversations=8)
    assert {sample.domain for sample in kept} == {"chat", "code"}
    assert left_out == ("stray",)


def test_a_domain_that_a_champion_was_measured_on_stays_in_however_small():
    kept, left_out = judgeable(samples(chat=1), known={"chat"}, min_conversations=8)
    assert len(kept) == 1
    assert left_out == ()


def test_a_known_domain_without_a_sample_is_not_judged_and_is_named():
    kept, left_out = judgeable(samples(chat=8, stray=2), known={"chat", "code"}, min_conversations=8)
    assert {sample.domain for sample in kept} == {"chat"}
    assert left_out == ("code", "stray")


def test_a_domain_without_conversations_here_has_no_best_to_be_held_to():
    past = Version(kind="draft", number=3, sha256="0" * 64, tags={}, created_ms=0)
    scores = {3: [Score(id="a", domain="chat", steps=10, accepted=5.0)]}
    assert best_taus({"chat": past, "code": past}, scores) == {"chat": 1.5}
