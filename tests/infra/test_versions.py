"""Lineage as tags: there and back, tags of earlier revisions, and tags that somebody changed by hand."""

import json
import shutil
from collections.abc import Callable

import pytest

from infra.artifacts import Artifact, staged
from infra.registry import Registry, open_registry
from infra.versions import (
    ForeignVersion,
    Lineage,
    Pair,
    Target,
    TrainedWindow,
    Version,
    ancestors,
    best_versions,
    challenger_to_go_on,
    next_challenger,
    past_champions,
    predecessors,
    trained_on,
    tried_again,
    written_tags,
)
from infra.waiting import wants_approval
from infra.windows import Window
from tasks.promote import find_candidate, promote_build, promote_candidate, promote_version, roll_back
from tests.infra.conftest import champion_number
from tests.tags import TARGET, draft_tags

EARLIER = {
    "target_name": "SmolLM2-135M-Instruct",
    "target_version": "1",
    **dict.fromkeys(("target_sha256", "tokenizer_sha256", "chat_template_sha256"), "5af571cb" * 8),
    "vocab_size": "49152",
    "parent": "1",
    "window_first_seq": "1",
    "window_last_seq": "200",
    "window_sha256": "0f1e",
    "window_uri": "file:///home/somebody/.redraft/artifacts/samples/0f1e",
    "sampling": '{"max_tokens": 40, "temperature": 0.0}',
    **dict.fromkeys(("quantization", "gate_reasons"), ""),
    **dict.fromkeys(("gate_test", "previous"), "1"),
    "git_commit": "8179b87",
    "flow_run": "a run",
    "gate": "passed",
    "line": "0123456789abcdef",
    "tau": '{"chat": 1.8512, "code": 2.1034}',
    "golden_tau": "1.6250",
    "samples_uri": "file:///home/somebody/.redraft/artifacts/samples/0a0b",
    "samples_sha256": "0a0b",
    "seed": "0",
    "sha256": "1" * 64,
    "model_id": "m-1",
}
FILES = Artifact(uri="file:///nowhere", sha256="0" * 64, kind="draft")
WINDOW = Window(first_seq=1, last_seq=9, num_rows=9, sha256="w1", owner="anyone")
Register = Callable[..., Version]


def version(**changed: str) -> Version:
    return Version(kind="draft", number=3, sha256="1" * 64, tags=EARLIER | changed, created_ms=0)


def test_a_lineage_survives_the_trip_through_tags() -> None:
    trained = Lineage(
        target=TARGET,
        target_version=2,
        parent=4,
        window=TrainedWindow(first_seq=1, last_seq=60, sha256="w", uri="file:///w"),
        sampling={"max_tokens": 40, "temperature": 0.0},
        quantization="rtn",
        git_commit="c",
        flow_run="r",
        gate="refused",
        gate_reasons='domain "code" may lose; no gain',
        gate_test=3,
        gated_against=4,
        line="L",
        tau={"chat": 1.5},
        golden_tau=1.25,
        num_draft_tokens=3,
        teachers={"9" * 64: {"name": "larger", "weight": 0.5}},
        seed=7,
    )
    assert set(trained.to_tags()) == set(Lineage.tag_names())
    assert Lineage.from_tags(trained.to_tags()) == trained
    first = Lineage.from_tags(draft_tags())
    assert (first.parent, first.window, first.gate, first.tau, first.num_draft_tokens) == (None, None, None, {}, None)
    assert Lineage.from_tags(first.to_tags()) == first


def test_what_does_not_apply_has_no_tag_and_a_missing_tag_is_noticed_all_the_same() -> None:
    written = written_tags("draft", draft_tags(parent="3", gate="refused"))
    assert not {"", "{}"} & {*written.values()}
    lineage = Lineage.from_tags(written)
    assert (lineage.parent, lineage.gate, lineage.window, lineage.tau, lineage.seed) == (3, "refused", None, {}, None)
    assert Lineage.from_tags(written | {"seed": "7"}).seed == 7
    count = written["lineage_tags"]
    for name in written.keys() - {"lineage_tags"}:
        with pytest.raises(ValueError, match=f"^{int(count) - 1} tags .* are there; tag lineage_tags is '{count}'$"):
            Lineage.from_tags({tag: value for tag, value in written.items() if tag != name})
    with pytest.raises(ValueError, match="tag lineage_tags is 'all'"):
        Lineage.from_tags(written | {"lineage_tags": "all"})
    assert written_tags("target", {"flow_run": "", "vocab_size": "5"}) == {"vocab_size": "5"}


def test_a_version_of_an_earlier_revision_is_read() -> None:
    lineage = version().lineage
    assert lineage.target == version().target == Target.from_tags(EARLIER)
    assert (lineage.target_version, lineage.parent, lineage.gate, lineage.gate_test) == (1, 1, "passed", 1)
    assert lineage.window is not None
    assert (lineage.window.first_seq, lineage.window.last_seq) == (1, 200)
    assert (lineage.tau, lineage.golden_tau, lineage.teachers) == ({"chat": 1.8512, "code": 2.1034}, 1.625, {})
    assert (lineage.num_draft_tokens, lineage.gated_against, lineage.source) == (None, None, "")
    assert (version().previous, version().was_champion, version().quarantined, version().forced) == (1, True, "", "")


@pytest.mark.parametrize(
    ("tag", "value"),
    [
        ("parent", "one"),
        ("vocab_size", ""),
        ("window_last_seq", "all"),
        ("window_first_seq", ""),
        ("sampling", "greedy"),
        ("gate", "Passed"),
        ("tau", "{"),
        ("tau", '{"chat": "much"}'),
        ("tau", '{"chat": 0.5}'),
        ("golden_tau", "nan"),
        ("num_draft_tokens", "0"),
    ],
)
def test_a_tag_that_was_changed_by_hand_is_one_error_that_names_version_and_tag(tag: str, value: str) -> None:
    with pytest.raises(ForeignVersion, match=f"^draft 3: tag {tag} is ") as caught:
        _ = version(**{tag: value}).lineage
    assert "\n" not in str(caught.value)


def test_a_missing_tag_is_named_and_a_damaged_one_keeps_nobody_from_seeing_a_quarantine() -> None:
    tags = {name: value for name, value in EARLIER.items() if name not in ("parent", "gate")}
    with pytest.raises(ValueError, match="tag parent is missing; tag gate is missing"):
        Lineage.from_tags(tags)
    assert version(tau="{", quarantined="worse").quarantined == "worse"
    with pytest.raises(ForeignVersion, match="draft 3: tag previous is 'x'"):
        _ = version(previous="x").previous
    assert version(previous="none").previous is None


@pytest.fixture
def registry(store, tmp_path, monkeypatch) -> Registry:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    shutil.copy(store, tmp_path / "mlflow.db")
    return open_registry()


@pytest.fixture
def register(registry, tmp_path) -> Register:
    """What registers a draft, or a target, whose files tell its tags."""
    defaults = draft_tags(line="L", gate_test="0", tau="{}", gate_reasons="")

    def made(kind: str = "draft", **tags: str) -> Version:
        with staged(tmp_path / f"{kind}-files") as directory:
            (directory / "weights").write_text(json.dumps(tags))
        return registry.register(kind, tmp_path / f"{kind}-files", defaults | tags)

    return made


@pytest.fixture
def candidate(register) -> Register:
    """What registers a draft that was trained on the window, from draft 1 and passed unless it is said otherwise."""
    window = {"window_first_seq": "1", "window_last_seq": "9", "window_sha256": "w1"}
    return lambda **tags: register(**{"parent": "1", "gate": "passed", "gate_test": "1"} | window | tags)


@pytest.fixture
def serve(registry, register) -> Register:
    def made(**tags: str) -> Version:
        registry.promote("draft", number := register(**{"num_draft_tokens": "3"} | tags).number)
        return registry.get("draft", number)

    return made


def pair(target: Version, draft: Version) -> Pair:
    return Pair(target=target, draft=draft, target_files=FILES, draft_files=FILES)


@pytest.fixture
def served(register) -> Pair:
    target, first = register("target"), register()
    promote_build.fn(target, first)
    return pair(target, first)


def test_a_line_is_followed_to_its_start_and_knows_its_best(registry, register):
    first = register(tau='{"chat": 2.0}')
    register(parent="1", tau='{"chat": 1.9, "code": 1.5}', gate_test="1")
    register(parent="2", gate="refused", gate_test="2")
    fourth = register(parent="2", tau='{"chat": 2.0, "code": 1.4}', gate_test="3")
    line = ancestors(registry, fourth)
    assert [version.number for version in line] == [4, 2, 1]
    assert {domain: version.number for domain, version in best_versions(line).items()} == {"chat": 4, "code": 2}
    assert first.lineage.tau == {"chat": 2.0}


def pool_of(registry: Registry, domain: str = "chat", first_seq: int = 100) -> list[int]:
    window = WINDOW.model_copy(update={"first_seq": first_seq, "last_seq": first_seq + 9})
    versions, champion = registry.versions("draft"), registry.champion("draft")
    return [one.number for one in past_champions(versions, champion, domain, 3, window)]


@pytest.mark.slow
def test_the_pool_has_those_that_served_the_best_in_the_domain_first_and_none_that_does_not_fit(
    registry, register, serve
):
    serve(tau='{"chat": 2.0}', parent="")
    serve(tau='{"chat": 1.5, "code": 1.9}', parent="1")
    serve(num_draft_tokens="4")
    serve(target_sha256="another")
    serve(tau='{"code": 1.9}', parent="2")
    register(num_draft_tokens="3", gate="passed")  # never served
    assert pool_of(registry) == [1, 2]
    serve(parent="5")
    assert pool_of(registry) == [1, 2, 5]
    assert pool_of(registry, "code") == pool_of(registry, "math") == [5, 2, 1]


@pytest.mark.slow
def test_a_draft_found_bad_is_never_in_the_pool_nor_are_its_files_under_another_number(registry, serve, tmp_path):
    first = serve()
    serve(parent="1")
    again = registry.register("draft", registry.download(first, tmp_path / "cache"), {**first.lineage.to_tags()})
    assert again.sha256 == first.sha256
    assert pool_of(registry) == [1]
    registry.quarantine("draft", again.number, "worse than draft 2 where it returned")
    assert pool_of(registry) == []


@pytest.mark.slow
def test_a_draft_that_somebody_took_back_or_that_saw_the_rows_is_not_in_the_pool(registry, serve):
    serve()
    serve(parent="1", window_first_seq="90", window_last_seq="100", window_sha256="w")
    registry.roll_back("draft")
    assert pool_of(registry) == []
    serve(parent="1")
    assert pool_of(registry) == [1]
    registry.promote("draft", 2)  # a person's choice
    serve(parent="2")
    assert pool_of(registry) == [3, 1]
    assert pool_of(registry, first_seq=101) == [3, 2, 1]


def test_one_that_returns_has_the_rows_of_its_old_line_and_the_floors_of_all_it_had_to_beat(registry, register):
    register(tau='{"chat": 2.0}')
    register(parent="1", gate="passed", gate_test="1", tau='{"chat": 1.4, "code": 1.9}')
    told = {"gated_against": "2", "gate": "passed", "gate_test": "1", "returns_for": "chat"}
    back = register(parent="1", tau='{"chat": 1.9}', **told)
    after = register(parent="3", gate="passed", gate_test="1", tau='{"chat": 2.1}')
    assert back.lineage.returns == "draft 1 returns for chat"
    assert [one.number for one in ancestors(registry, after)] == [4, 3, 1]
    assert [one.number for one in predecessors(registry, after)] == [4, 3, 2, 1]
    best = best_versions(predecessors(registry, after))
    assert {domain: one.number for domain, one in best.items()} == {"chat": 4, "code": 2}


def test_a_past_draft_is_one_of_the_challengers_and_is_tried_once_a_domain_by_each_champion(registry, register):
    for _ in range(2):
        register()
    back = register(parent="1", gated_against="2", gate="refused", gate_test="1", returns_for="chat")
    versions = registry.versions("draft")
    assert (next_challenger(versions, 2), next_challenger(versions, 1)) == (2, 1)
    assert tried_again(versions, 2, "chat") == back
    assert tried_again(versions, 2, "code") is tried_again(versions, 1, "chat") is None
    assert challenger_to_go_on(versions, 1, WINDOW.first_seq) is None


def test_all_challengers_of_a_champion_count_and_those_of_others_do_not(registry, register):
    register()
    assert next_challenger(registry.versions("draft"), 1) == 1
    register(parent="1", gate="refused", gate_test="1")
    register(gated_against="1", gate="undecided", gate_test="2")
    register(parent="2", gate="refused", gate_test="7")
    assert next_challenger(registry.versions("draft"), 1) == 3


@pytest.mark.slow
def test_a_challenger_goes_on_from_its_last_undecided_checkpoint_and_anew_with_each_champion(registry, register):
    def made(parent: int, gate: str, first_seq: int, gate_test: int = 1, **tags: str) -> int:
        rows = {"window_first_seq": str(first_seq), "window_last_seq": str(first_seq + 8), "window_sha256": "w"}
        return register(parent=str(parent), gate=gate, gate_test=str(gate_test), **rows, **tags).number

    def start(champion: int, first_seq: int) -> tuple[int | None, int]:
        versions = registry.versions("draft")
        found = challenger_to_go_on(versions, champion, first_seq)
        return None if found is None else found.number, next_challenger(versions, champion)

    register()
    assert start(1, 1) == (None, 1)
    assert made(1, "undecided", 1) == 2
    assert start(1, 10) == (2, 2)
    assert start(1, 1) == (None, 2)  # of the same rows, some of which were erased: they are not counted twice
    assert made(1, "undecided", 10, continues="2") == 3
    assert start(1, 19) == (3, 2)
    assert register(gated_against="1", gate="refused", gate_test="2").number == 4
    assert start(1, 19) == (3, 3)  # a draft from elsewhere is another challenger, and ends none
    assert made(1, "refused", 19, continues="3") == 5
    assert start(1, 28) == (None, 3)
    assert made(1, "passed", 28, gate_test=3) == 6
    assert start(6, 37) == (None, 1)
    assert start(1, 37) == (None, 4)  # somebody took 6 back
    assert made(1, "undecided", 37, gate_test=4) == 7
    assert start(1, 46) == (7, 5)
    registry.quarantine("draft", 7, "another output")
    assert start(1, 46) == (None, 5)


GATED = [("undecided", "", "undecided"), ("passed", "", "promoted"), ("refused", "", "refused")]


@pytest.mark.parametrize(("gate", "reasons", "told"), [*GATED, ("passed", "x", "refused")])
def test_a_candidate_that_a_crash_left_is_found_and_promoted_only_if_it_passed(
    registry, served, candidate, gate, reasons, told
):
    assert find_candidate.fn(served, WINDOW) is None
    left = candidate(gate=gate)
    for reason in reasons:
        registry.quarantine("draft", left.number, reason)
    found = find_candidate.fn(served, WINDOW)
    assert found.number == left.number
    assert promote_candidate.fn(served, found) == told
    assert champion_number(registry) == {"promoted": left}.get(told, served.draft).number


@pytest.mark.slow
def test_a_candidate_that_a_person_must_approve_of_waits_and_is_promoted_over_the_champion_it_beat(
    registry, served, candidate
):
    first = candidate()
    assert promote_candidate.fn(served, first, approve=True) == "waits for approval"
    assert champion_number(registry) == served.draft.number
    assert wants_approval(served.draft, registry.versions("draft")) == first
    assert promote_candidate.fn(served, candidate(gate="refused"), approve=True) == "refused"
    newer = candidate()
    assert wants_approval(served.draft, registry.versions("draft")) == newer  # learning goes on, and the newest waits
    champion = promote_version.fn(newer.number)
    assert wants_approval(champion, registry.versions("draft")) is None
    with pytest.raises(ValueError, match=f"no longer the champion: that is {newer.number}"):
        promote_version.fn(first.number)
    for again, reason in ((served.draft, "back"), (newer, "")):  # it was the champion before
        assert promote_version.fn(again.number, reason).number == again.number


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "quarantine"), [("passed", ""), ("passed", "slow on phones"), ("refused", "")])
def test_a_rollback_during_training_is_not_overwritten_and_the_rows_wait_for_the_draft_that_is_back(
    registry, served, serve, candidate, gate, quarantine
):
    during = pair(served.target, serve(parent="1"))
    roll_back.fn(quarantine)
    assert promote_candidate.fn(during, candidate(parent="2", gate=gate)) == "outdated"
    assert champion_number(registry) == served.draft.number
    assert find_candidate.fn(pair(served.target, registry.champion("draft")), WINDOW) is None


@pytest.mark.slow
def test_an_outdated_candidate_that_a_person_promotes_has_the_rows_already(served, serve, candidate):
    serve(parent="1")
    outdated = candidate(parent="2")
    roll_back.fn()
    with pytest.raises(ValueError, match="draft 2, which is no longer the champion: that is 1"):
        promote_version.fn(outdated.number)
    now = pair(served.target, promote_version.fn(outdated.number, "it was looked at"))
    assert promote_candidate.fn(now, find_candidate.fn(now, WINDOW)) == "already trained"


@pytest.mark.parametrize("gate", ["passed", "undecided"])
def test_a_child_of_a_quarantined_champion_is_not_promoted(registry, served, candidate, gate):
    child = candidate(gate=gate)
    registry.quarantine("draft", served.draft.number, "another output")
    assert promote_candidate.fn(served, child) == "outdated"
    assert champion_number(registry) == served.draft.number
    with pytest.raises(ValueError, match="--force"):
        promote_version.fn(child.number)
    assert promote_version.fn(child.number, "it was looked at").number == child.number


def test_a_candidate_of_a_draft_that_is_no_longer_served_is_left_alone(registry, register, candidate):
    target, _ = register("target"), register()
    candidate()
    other = register(line="M")
    assert len(trained_on(registry.versions("draft"), WINDOW)) == 1
    assert find_candidate.fn(pair(target, other), WINDOW) is None


@pytest.mark.slow
def test_building_again_does_not_take_a_refreshed_champion_back(registry, served, candidate):
    registry.promote("draft", number := candidate().number)
    promote_build.fn(served.target, served.draft)
    assert champion_number(registry) == number
