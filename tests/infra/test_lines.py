"""Lines of drafts, as tags tell them, in a real registry; and what is done with a candidate that a crash left."""

import json
import shutil
from pathlib import Path

import pytest

from infra.artifacts import Artifact, staged
from infra.lines import (
    ancestors,
    best_versions,
    challenger_to_go_on,
    next_challenger,
    past_champions,
    predecessors,
    trained_on,
    tried_again,
)
from infra.registry import Registry, open_registry
from infra.versions import Pair, Version, is_quarantined
from infra.waiting import wants_approval
from infra.windows import Window
from tasks.promote import find_candidate, promote_build, promote_candidate, promote_version, roll_back
from tests.tags import draft_tags

FILES = Artifact(uri="file:///nowhere", sha256="0" * 64, kind="draft")
WINDOW = Window(first_seq=1, last_seq=9, num_rows=9, sha256="w1", owner="anyone")


@pytest.fixture
def registry(store, tmp_path, monkeypatch) -> Registry:
    """Return the registry of a fresh home."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    shutil.copy(store, tmp_path / "mlflow.db")
    return open_registry()


def register(registry: Registry, tmp_path: Path, kind: str = "draft", **tags: str) -> Version:
    with staged(tmp_path / f"{kind}-files") as directory:
        (directory / "weights").write_text(json.dumps(tags))
    defaults = {"line": "L", "gate_test": "0", "tau": "{}", "gate_reasons": ""}
    return registry.register(kind, tmp_path / f"{kind}-files", {**draft_tags(), **defaults, **tags})


def register_candidate(registry: Registry, tmp_path: Path, parent: Version, **tags: str) -> Version:
    window = {"window_first_seq": "1", "window_last_seq": "9", "window_sha256": "w1"}
    trained = {"parent": str(parent.number), "gate": "passed", "gate_test": "1", **window}
    return register(registry, tmp_path, **{**trained, **tags})


def pair(target: Version, draft: Version) -> Pair:
    return Pair(target=target, draft=draft, target_files=FILES, draft_files=FILES)


@pytest.fixture
def served(registry, tmp_path) -> Pair:
    """A target and a draft, which serve."""
    target, first = register(registry, tmp_path, "target"), register(registry, tmp_path)
    promote_build.fn(target, first)
    return pair(target, first)


def test_a_line_is_followed_to_its_start_and_knows_its_best(registry, tmp_path):
    first = register(registry, tmp_path, tau='{"chat": 2.0}')
    second = register(registry, tmp_path, parent="1", tau='{"chat": 1.9, "code": 1.5}', gate_test="1")
    register(registry, tmp_path, parent="2", gate="refused", gate_test="2")
    fourth = register(registry, tmp_path, parent="2", tau='{"chat": 2.0, "code": 1.4}', gate_test="3")
    line = ancestors(registry, fourth)
    assert [version.number for version in line] == [4, 2, 1]
    assert {domain: version.number for domain, version in best_versions(line).items()} == {"chat": 4, "code": 2}
    assert first.lineage.tau == {"chat": 2.0}
    assert second.number == 2


def serve(registry: Registry, tmp_path: Path, **tags: str) -> Version:
    made = register(registry, tmp_path, **{"num_draft_tokens": "3", **tags})
    registry.promote("draft", made.number)
    return registry.get("draft", made.number)


def pool_of(registry: Registry, domain: str = "chat", first_seq: int = 100) -> list[int]:
    window = WINDOW.model_copy(update={"first_seq": first_seq, "last_seq": first_seq + 9})
    champion = registry.champion("draft")
    return [one.number for one in past_champions(registry.versions("draft"), champion, domain, 3, window)]


@pytest.mark.slow
def test_the_pool_has_those_that_served_the_best_in_the_domain_first_and_none_that_does_not_fit(registry, tmp_path):
    serve(registry, tmp_path, tau='{"chat": 2.0}', parent="")
    serve(registry, tmp_path, tau='{"chat": 1.5, "code": 1.9}', parent="1")
    serve(registry, tmp_path, num_draft_tokens="4")
    serve(registry, tmp_path, target_sha256="another")
    serve(registry, tmp_path, tau='{"code": 1.9}', parent="2")
    register(registry, tmp_path, num_draft_tokens="3", gate="passed")  # never served
    assert pool_of(registry) == [1, 2]
    serve(registry, tmp_path, parent="5")
    assert pool_of(registry) == [1, 2, 5]
    assert pool_of(registry, "code") == [5, 2, 1]
    assert pool_of(registry, "math") == [5, 2, 1]


@pytest.mark.slow
def test_a_draft_found_bad_is_never_in_the_pool_nor_are_its_files_under_another_number(registry, tmp_path):
    first = serve(registry, tmp_path)
    serve(registry, tmp_path, parent="1")
    again = registry.register("draft", registry.download(first, tmp_path / "cache"), {**first.lineage.to_tags()})
    assert again.sha256 == first.sha256
    assert pool_of(registry) == [1]
    registry.quarantine("draft", again.number, "worse than draft 2 where it returned")
    assert pool_of(registry) == []


@pytest.mark.slow
def test_a_draft_that_somebody_took_back_or_that_saw_the_rows_is_not_in_the_pool(registry, tmp_path):
    serve(registry, tmp_path)
    serve(registry, tmp_path, parent="1", window_first_seq="90", window_last_seq="100", window_sha256="w")
    registry.roll_back("draft")
    assert pool_of(registry) == []
    serve(registry, tmp_path, parent="1")
    assert pool_of(registry) == [1]
    registry.promote("draft", 2)  # a person's choice
    serve(registry, tmp_path, parent="2")
    assert pool_of(registry) == [3, 1]
    assert pool_of(registry, first_seq=101) == [3, 2, 1]


def test_one_that_returns_has_the_rows_of_its_old_line_and_the_floors_of_all_it_had_to_beat(registry, tmp_path):
    register(registry, tmp_path, tau='{"chat": 2.0}')
    register(registry, tmp_path, parent="1", gate="passed", gate_test="1", tau='{"chat": 1.4, "code": 1.9}')
    told = {"gated_against": "2", "gate": "passed", "gate_test": "1", "returns_for": "chat"}
    back = register(registry, tmp_path, parent="1", tau='{"chat": 1.9}', **told)
    after = register(registry, tmp_path, parent="3", gate="passed", gate_test="1", tau='{"chat": 2.1}')
    assert back.lineage.returns == "draft 1 returns for chat"
    assert [one.number for one in ancestors(registry, after)] == [4, 3, 1]
    assert [one.number for one in predecessors(registry, after)] == [4, 3, 2, 1]
    best = best_versions(predecessors(registry, after))
    assert {domain: one.number for domain, one in best.items()} == {"chat": 4, "code": 2}


def test_a_past_draft_is_one_of_the_challengers_and_is_tried_once_a_domain_by_each_champion(registry, tmp_path):
    for _ in range(2):
        register(registry, tmp_path)
    told = {"gated_against": "2", "gate": "refused", "gate_test": "1", "returns_for": "chat"}
    back = register(registry, tmp_path, parent="1", **told)
    versions = registry.versions("draft")
    assert (next_challenger(versions, 2), next_challenger(versions, 1)) == (2, 1)
    assert tried_again(versions, 2, "chat") == back
    assert tried_again(versions, 2, "code") is tried_again(versions, 1, "chat") is None
    assert challenger_to_go_on(versions, 1, WINDOW.first_seq) is None


def test_all_challengers_of_a_champion_count_and_those_of_others_do_not(registry, tmp_path):
    register(registry, tmp_path)
    assert next_challenger(registry.versions("draft"), 1) == 1
    register(registry, tmp_path, parent="1", gate="refused", gate_test="1")
    register(registry, tmp_path, gated_against="1", gate="undecided", gate_test="2")
    register(registry, tmp_path, parent="2", gate="refused", gate_test="7")
    assert next_challenger(registry.versions("draft"), 1) == 3


@pytest.mark.slow
def test_a_challenger_goes_on_from_its_last_undecided_snapshot_and_anew_with_each_champion(registry, tmp_path):
    def snapshot(parent: int, gate: str, first_seq: int, gate_test: int = 1, **tags: str) -> int:
        rows = {"window_first_seq": str(first_seq), "window_last_seq": str(first_seq + 8), "window_sha256": "w"}
        judged = {"parent": str(parent), "gate": gate, "gate_test": str(gate_test)}
        return register(registry, tmp_path, **(rows | judged | tags)).number

    def start(champion: int, first_seq: int) -> tuple[int | None, int]:
        versions = registry.versions("draft")
        window = WINDOW.model_copy(update={"first_seq": first_seq, "last_seq": first_seq + 8})
        found = challenger_to_go_on(versions, champion, window.first_seq)
        return None if found is None else found.number, next_challenger(versions, champion)

    register(registry, tmp_path)
    assert start(1, 1) == (None, 1)
    assert snapshot(1, "undecided", 1) == 2
    assert start(1, 10) == (2, 2)
    assert start(1, 1) == (None, 2)  # of the same rows, some of which were erased: they are not counted twice
    assert snapshot(1, "undecided", 10, continues="2") == 3
    assert start(1, 19) == (3, 2)
    assert register(registry, tmp_path, gated_against="1", gate="refused", gate_test="2").number == 4
    assert start(1, 19) == (3, 3)  # a draft from elsewhere is another challenger, and ends none
    assert snapshot(1, "refused", 19, continues="3") == 5
    assert start(1, 28) == (None, 3)
    assert snapshot(1, "passed", 28, gate_test=3) == 6
    assert start(6, 37) == (None, 1)
    assert start(1, 37) == (None, 4)  # somebody took 6 back
    assert snapshot(1, "undecided", 37, gate_test=4) == 7
    assert start(1, 46) == (7, 5)
    registry.quarantine("draft", 7, "another output")
    assert start(1, 46) == (None, 5)


def test_an_undecided_candidate_keeps_its_window_and_the_champion_stays(registry, tmp_path, served):
    candidate = register_candidate(registry, tmp_path, served.draft, gate="undecided")
    assert find_candidate.fn(served, WINDOW) == candidate
    assert promote_candidate.fn(served, candidate) == "undecided"
    assert registry.champion("draft").number == served.draft.number
    registry.quarantine("draft", served.draft.number, "another output")
    assert promote_candidate.fn(served, candidate) == "outdated"


def test_a_candidate_that_passed_before_a_crash_is_found_and_promoted(registry, tmp_path, served):
    assert find_candidate.fn(served, WINDOW) is None
    candidate = register_candidate(registry, tmp_path, served.draft)
    found = find_candidate.fn(served, WINDOW)
    assert found == candidate
    assert promote_candidate.fn(served, found) == "promoted"
    assert registry.champion("draft").number == candidate.number


def test_a_window_in_the_champions_line_is_not_trained_on_again(registry, tmp_path):
    target, first = register(registry, tmp_path, "target"), register(registry, tmp_path)
    candidate = register_candidate(registry, tmp_path, first)
    now = pair(target, candidate)
    assert promote_candidate.fn(now, find_candidate.fn(now, WINDOW)) == "already trained"


@pytest.mark.slow
@pytest.mark.parametrize("quarantined", [False, True])
def test_a_refused_or_quarantined_candidate_stays_where_it_is(registry, tmp_path, served, quarantined):
    candidate = register_candidate(registry, tmp_path, served.draft, gate="passed" if quarantined else "refused")
    if quarantined:
        registry.quarantine("draft", candidate.number, "bad")
    found = find_candidate.fn(served, WINDOW)
    assert promote_candidate.fn(served, found) == "refused"
    assert registry.champion("draft").number == served.draft.number


@pytest.mark.slow
def test_a_candidate_that_a_person_must_approve_of_waits_and_is_promoted_over_the_champion_it_beat(
    registry, tmp_path, served
):
    candidate = register_candidate(registry, tmp_path, served.draft)
    assert promote_candidate.fn(served, candidate, approve=True) == "waits for approval"
    assert registry.champion("draft").number == served.draft.number
    assert wants_approval(served.draft, registry.versions("draft")) == candidate
    refused = register_candidate(registry, tmp_path, served.draft, gate="refused")
    assert promote_candidate.fn(served, refused, approve=True) == "refused"
    newer = register_candidate(registry, tmp_path, served.draft)
    assert wants_approval(served.draft, registry.versions("draft")) == newer  # learning goes on, and the newest waits
    champion = promote_version.fn(newer.number)
    assert wants_approval(champion, registry.versions("draft")) is None
    with pytest.raises(ValueError, match=f"no longer the champion: that is {newer.number}; to promote it anyway"):
        promote_version.fn(candidate.number)
    assert promote_version.fn(served.draft.number, "back").number == served.draft.number
    assert promote_version.fn(newer.number).number == newer.number  # it was the champion before


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["passed", "refused"])
@pytest.mark.parametrize("quarantine", ["", "slow on phones"])
def test_a_rollback_during_training_is_not_overwritten_and_the_rows_wait_for_the_draft_that_is_back(
    registry, tmp_path, served, gate, quarantine
):
    second = register(registry, tmp_path, parent="1")
    registry.promote("draft", second.number)
    during = pair(served.target, second)
    roll_back.fn(quarantine)
    candidate = register_candidate(registry, tmp_path, second, gate=gate)
    assert promote_candidate.fn(during, candidate) == "outdated"
    assert registry.champion("draft").number == served.draft.number
    assert find_candidate.fn(pair(served.target, registry.champion("draft")), WINDOW) is None
    assert not is_quarantined(candidate)


@pytest.mark.slow
def test_an_outdated_candidate_that_a_person_promotes_has_the_rows_already(registry, tmp_path, served):
    second = register(registry, tmp_path, parent="1")
    registry.promote("draft", second.number)
    candidate = register_candidate(registry, tmp_path, second)
    roll_back.fn()
    assert promote_candidate.fn(pair(served.target, second), candidate) == "outdated"
    with pytest.raises(ValueError, match="passed its gate, but .* draft 2, which is no longer the champion: that is 1"):
        promote_version.fn(candidate.number)
    now = pair(served.target, promote_version.fn(candidate.number, "it was looked at"))
    assert promote_candidate.fn(now, find_candidate.fn(now, WINDOW)) == "already trained"


def test_a_child_of_a_quarantined_champion_is_not_promoted(registry, tmp_path, served):
    candidate = register_candidate(registry, tmp_path, served.draft)
    registry.quarantine("draft", served.draft.number, "another output")
    assert promote_candidate.fn(served, candidate) == "outdated"
    assert registry.champion("draft").number == served.draft.number
    with pytest.raises(ValueError, match="was trained from draft 1, which is quarantined: another output.*--force"):
        promote_version.fn(candidate.number)
    assert promote_version.fn(candidate.number, "it was looked at").number == candidate.number


def test_a_candidate_of_a_draft_that_is_no_longer_served_is_left_alone(registry, tmp_path):
    target, first = register(registry, tmp_path, "target"), register(registry, tmp_path)
    register_candidate(registry, tmp_path, first)
    other = register(registry, tmp_path, line="M")
    assert len(trained_on(registry.versions("draft"), WINDOW)) == 1
    assert find_candidate.fn(pair(target, other), WINDOW) is None


@pytest.mark.slow
def test_building_again_does_not_take_a_refreshed_champion_back(registry, tmp_path, served):
    candidate = register_candidate(registry, tmp_path, served.draft)
    registry.promote("draft", candidate.number)
    promote_build.fn(served.target, served.draft)
    assert registry.champion("draft").number == candidate.number
