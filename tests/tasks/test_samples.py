"""Samples: which rows are used, and on which side they are."""

import pytest

from infra.artifacts import publish, staged
from infra.consent import QueryRow
from models.hidden import Sample
from tasks.samples import draw_per_domain, part_of, read_samples, usable, write_samples


def row(id: str, **values: object) -> QueryRow:
    return QueryRow(
        **{
            "id": id,
            "time_ms": 0,
            "domain": "code",
            "consent": "full",
            "scrubber_revision": 1,
            "target_version": 1,
            "draft_version": None,
            "prompt_ids": [1, 2],
            "completion_ids": [3, 4, *id.encode()],
            "sampling": {"temperature": 0.7},
            "finish_reason": "stop",
            "speculating": True,
            **values,
        }
    )


def test_rows_that_cannot_be_trained_on_are_left_out_and_counted():
    rows = [
        row("a"),
        row("b", target_version=2),
        row("c", prompt_ids=None),
        row("d", completion_ids=[1, 2]),
        row("e", completion_ids=[3, 4, ord("a")]),
        row("f", sampling={}),
    ]
    samples, left_out = usable(rows, target_version=1, max_share_per_key=1)
    assert samples == [Sample("a", "code", [1, 2], [3, 4, ord("a")], 0.7)]
    assert left_out == {
        "answered by another target": 1,
        "without token ids or temperature": 2,
        "too short": 1,
        "repeated": 1,
    }


def test_a_flood_from_one_key_counts_once_a_row_and_up_to_its_share():
    flood = [row(f"f{number}", key="flooder") for number in range(90)]
    copies = [row(f"c{number}", key="flooder", completion_ids=flood[0].completion_ids) for number in range(900)]
    others = [row(f"o{number}", key=f"key{number % 2}") for number in range(10)]
    samples, left_out = usable(flood + copies + others, target_version=1, max_share_per_key=0.25)
    assert left_out == {"repeated": 900, "above one key's share": 65}
    assert [one.id[0] for one in samples] == ["f"] * 25 + ["o"] * 10


def test_a_key_that_is_alone_and_rows_without_one_have_no_share_to_keep():
    alone = [row(f"f{number}", key="flooder") for number in range(30)]
    assert usable(alone, 1, 0.1)[1] == {}
    assert usable([row(f"n{number}") for number in range(30)] + alone[:1], 1, 0.1)[1] == {}


def test_a_prompt_is_always_on_the_same_side_in_the_wanted_share():
    parts = [part_of([number, 7], 0.25) for number in range(4000)]
    assert parts == [part_of((number, 7), 0.25) for number in range(4000)]
    assert parts.count("held_out") / 4000 == pytest.approx(0.25, abs=0.03)


def test_a_larger_share_only_adds_to_what_is_held_out():
    prompts = [[number] for number in range(500)]
    small = {number for number, prompt in enumerate(prompts) if part_of(prompt, 0.1) == "held_out"}
    large = {number for number, prompt in enumerate(prompts) if part_of(prompt, 0.3) == "held_out"}
    assert small < large


def test_drawing_takes_up_to_so_many_of_each_domain_and_keeps_the_order():
    samples = [Sample(f"{domain}{number}", domain, [1], [2]) for number in range(20) for domain in ("a", "b")]
    samples.append(Sample("c0", "c", [1], [2]))
    drawn = draw_per_domain(samples, 5, seed=1)
    assert [sum(one.domain == domain for one in drawn) for domain in "abc"] == [5, 5, 1]
    assert drawn == [one for one in samples if one in drawn]
    assert drawn == draw_per_domain(samples, 5, seed=1) != draw_per_domain(samples, 5, seed=2)


def test_samples_survive_the_disk(tmp_path):
    samples = [Sample("a", "code", [1], [2, 3], 0.5)]
    with staged(tmp_path / "samples") as directory:
        write_samples(directory, "train", samples)
        write_samples(directory, "held_out", [])
    artifact = publish(tmp_path / "samples", "samples")
    assert read_samples(artifact, "train") == samples
    assert read_samples(artifact, "held_out") == []
