"""Which domains are judged."""

from models.hidden import Sample
from tasks.gate_draft import judgeable


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
