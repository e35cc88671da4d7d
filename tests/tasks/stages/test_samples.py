"""Samples: which rows are used, and on which side they are."""

import json
from collections import Counter

from infra.artifacts import publish, staged
from infra.consent import QueryRow
from models.core.learning.hidden import Sample
from tasks.stages.samples import (
    append_samples,
    draw_per_domain,
    read_samples,
    read_written,
    regression_set_versions,
    usable,
)
from tests.tasks.made import row_of


def row(id: str, **values: object) -> QueryRow:
    content = {"prompt_ids": [1, 2], "completion_ids": [3, 4, *id.encode()], "sampling": {"temperature": 0.7}}
    return row_of(id, **{"draft_version": None, **content, **values})


def test_rows_that_cannot_be_trained_on_are_left_out_and_counted():
    rows = [
        row("a"),
        row("b", target_version=2),
        row("c", prompt_ids=None),
        row("d", completion_ids=[1, 2]),
        row("e", completion_ids=[3, 4, ord("a")]),
        row("f", sampling={}),
    ]
    samples, left_out = usable(rows, target_version=1, max_share_per_key=1, min_rows=1)
    assert samples == [Sample("a", "code", [1, 2], [3, 4, ord("a")], 0.7)]
    assert left_out == {
        "answered by another target": 1,
        "without token ids or temperature": 2,
        "too short": 1,
        "repeated": 1,
    }


def test_a_sample_knows_where_its_draft_was_refused_and_where_nobody_knows() -> None:
    steps = {"drafted": [2, 0, 2, 2], "accepted": [1, 0, 2, 0], "drafted_ids": [[5, 6], [], [7, 8], [9, 9]]}
    rows = [
        row("a", completion_ids=list(range(10, 20)), **steps),
        row("b", completion_ids=list(range(20, 30)), matches=[3, 0, 0, 0], **steps),
        row("c", completion_ids=list(range(30, 37)), **steps),
        row("d", completion_ids=list(range(40, 50))),
    ]
    samples, _ = usable(rows, target_version=1, max_share_per_key=1, min_rows=1)
    # Steps begin at 1, 3, 4 and 7; what was looked up is not the draft's, and an answer of 7 tokens ends before 7.
    assert [one.rejected for one in samples] == [[2, 7], [7], [2], None]


def test_a_flood_from_one_key_counts_once_a_row_and_up_to_its_share():
    flood = [row(f"f{number}", key="flooder") for number in range(90)]
    copies = [row(f"c{number}", key="flooder", completion_ids=flood[0].completion_ids) for number in range(900)]
    others = [row(f"o{number}", key=f"key{number % 2}") for number in range(10)]
    samples, left_out = usable(flood + copies + others, target_version=1, max_share_per_key=0.5, min_rows=1)
    assert left_out == {"repeated": 900, "above one key's share": 80}
    assert [one.id[0] for one in samples] == ["f"] * 10 + ["o"] * 10
    again, _ = usable(flood[::-1] + others, target_version=1, max_share_per_key=0.5, min_rows=1)
    assert {one.id for one in again} == {one.id for one in samples}


def test_a_key_that_is_alone_gives_all_and_rows_without_one_are_one_key():
    alone = [row(f"f{number}", key="flooder") for number in range(30)]
    nobodys = [row(f"n{number}") for number in range(90)]
    assert usable(alone, 1, 0.1, min_rows=1)[1] == usable(nobodys, 1, 0.1, min_rows=1)[1] == {}
    assert usable([], 1, 0.5, min_rows=1) == ([], {})
    samples, _ = usable(nobodys + alone, 1, 0.5, min_rows=1)
    assert Counter(one.id[0] for one in samples) == {"n": 30, "f": 30}


def test_drawing_takes_up_to_so_many_of_each_domain_and_keeps_the_order():
    samples = [Sample(f"{domain}{number}", domain, [1], [2]) for number in range(20) for domain in ("a", "b")]
    samples.append(Sample("c0", "c", [1], [2]))
    drawn = draw_per_domain(samples, 5, seed=1)
    assert [sum(one.domain == domain for one in drawn) for domain in "abc"] == [5, 5, 1]
    assert drawn == [one for one in samples if one in drawn]
    assert drawn == draw_per_domain(samples, 5, seed=1) != draw_per_domain(samples, 5, seed=2)


def test_samples_of_an_older_release_have_no_clusters_and_no_probes(tmp_path):
    with staged(tmp_path / "samples") as directory:
        line = '{"id": "a", "domain": "code", "prompt_ids": [1], "completion_ids": [2, 3], "temperature": 0.5}'
        for part in ("train", "held_out"):
            (directory / f"{part}.jsonl").write_text(line + "\n")
    artifact = publish(tmp_path / "samples", "samples")
    assert read_samples(artifact, "train") == [Sample("a", "code", [1], [2, 3], 0.5, cluster="")]
    assert read_samples(artifact, "regression") == []


def test_a_probe_set_has_a_version_of_its_own_which_its_members_and_their_answers_alone_change():
    regression = [Sample("a", "code", [1], [2, 3]), Sample("b", "code", [1], [2, 4]), Sample("c", "chat", [1], [2])]
    versions = regression_set_versions(regression)
    assert list(versions) == ["chat", "code"]
    assert regression_set_versions(regression[::-1]) == versions
    assert regression_set_versions(regression[1:])["chat"] == versions["chat"]
    assert regression_set_versions(regression[1:])["code"] != versions["code"]
    answered = regression_set_versions([regression[0]._replace(completion_ids=[9]), *regression[1:]])
    assert answered["code"] != versions["code"]


def test_a_line_that_was_cut_short_is_removed_and_asked_for_again(tmp_path):
    file = tmp_path / "answers.jsonl"
    whole = json.dumps(Sample("a", "chat", [1], [2, 3, 4])._asdict()) + "\n"
    file.write_text(whole + '{"id": "b", "dom')
    assert [one.id for one in read_written(file)] == ["a"]
    assert file.read_text() == whole
    append_samples(file, [Sample("c", "chat", [1], [2, 3, 4])])
    assert [one.id for one in read_written(file)] == ["a", "c"]
    file.write_text('{"id": "b", "dom')
    assert read_written(file) == read_written(tmp_path / "none") == []
    assert file.read_text() == ""
