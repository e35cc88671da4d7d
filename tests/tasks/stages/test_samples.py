"""Samples: which rows are used, and on which side they are."""

import json
import logging
from collections import Counter

import pytest
import torch

from infra.artifacts import Artifact, publish, staged
from infra.consent import QueryRow
from infra.settings import load_settings
from models.core.checkpoints.loading import load_model
from models.core.learning import answering
from models.core.learning.captured import Captures
from models.core.learning.hidden import Sample
from models.recipe import load_recipe
from models.targets import stop_ids
from tasks.stages.samples import (
    append_samples,
    draw_per_domain,
    gate_by_own_answers,
    read_samples,
    read_written,
    regression_set_versions,
    tell_captured,
    usable,
)
from tests.models.drafts.answered import prompts
from tests.tasks.made import row_of

RECIPE = load_recipe("tiny")
TEXT = b"Paris is the capital of France."


pytestmark = pytest.mark.usefixtures("home")


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


def written(number: int, name: str = "import-") -> list[Sample]:
    """Return answers that a person wrote, one weighing more than the others."""
    ids = [3 + byte for byte in TEXT]
    asked = enumerate(prompts(number))
    return [Sample(f"{name}{place}", "chat", one, ids, 1.0, f"c{place}", 1.0 + (place == 0)) for place, one in asked]


def own(target: Artifact, of: list[Sample]) -> list[Sample]:
    model, rng = load_model(target.path), torch.Generator().manual_seed(1)
    return answering.answer(model, of, [24] * len(of), stop_ids(target.path), 256, rng)


@pytest.mark.slow
def test_domains_whose_imports_are_unlike_are_gated_by_the_targets_own_answers(
    target: Artifact, caplog: pytest.LogCaptureFixture
) -> None:
    human, served = written(14), written(2, "served-")
    like = [one._replace(id=f"{one.id}-like", domain="code") for one in own(target, written(14))]
    parts = {"train": human[:8] + like[:8], "held_out": human[8:12] + like[8:] + served, "regression": human[12:]}
    with caplog.at_level(logging.WARNING):
        gated, unlike = gate_by_own_answers(RECIPE, target, parts)
    assert list(unlike) == ["chat"]
    assert unlike["chat"].high < -0.2
    assert "imported answers of chat are unlike the target's" in caplog.text
    assert gated["train"] == parts["train"]  # learnt all the same
    assert [one for one in gated["held_out"] if one.domain == "code" or one in served] == like[8:] + served
    answered = [one for part in ("held_out", "regression") for one in gated[part] if one.id.startswith("import-")]
    answered = [one for one in answered if one.domain == "chat"]
    assert [one.id for one in answered] == [one.id for one in human[8:]]
    for before, after in zip(human[8:], answered, strict=True):
        assert after._replace(completion_ids=[]) == before._replace(completion_ids=[])
        assert after.completion_ids != before.completion_ids
    model = load_model(target.path)
    assert answering.compare(model, answered).value > answering.compare(model, human[:2]).value + 0.2
    assert gate_by_own_answers(RECIPE, target, parts) == (gated, unlike)


def test_rows_that_were_served_here_are_never_asked_about(target: Artifact) -> None:
    parts = {"train": written(4, "served-"), "held_out": [], "regression": []}
    assert gate_by_own_answers(RECIPE, target, parts) == (parts, {})
    assert not (load_settings().artifacts / "unlike").exists()


@pytest.mark.slow
def test_an_answer_that_would_not_have_been_logged_is_dropped_with_its_row(
    target: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    human = written(12)
    monkeypatch.setattr("infra.scrub.scrub", lambda text: "[taken out]")
    gated, unlike = gate_by_own_answers(RECIPE, target, {"train": human[:6], "held_out": human[6:], "regression": []})
    assert (list(unlike), gated["held_out"]) == (["chat"], [])


def test_where_nothing_was_captured_nothing_is_told_to_be_missing(tmp_path, caplog):
    caplog.set_level(logging.INFO, "redraft")
    captures = Captures(lambda id: tmp_path / id, "sha256")
    captures.find("a", [1], [1])
    tell_captured(captures, "learn from")
    assert caplog.messages == []
    (tmp_path / "b").write_bytes(b"torn")
    captures.find("b", [1], [1])
    tell_captured(captures, "learn from")
    assert caplog.messages == ["hidden states of answers to learn from: 1 corrupt, 1 missing"]
