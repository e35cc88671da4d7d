"""Lineage as tags: there and back, tags of earlier revisions, and tags that somebody changed by hand."""

import pytest

from infra.versions import ForeignVersion, Lineage, Target, TrainedWindow, Version, written_tags
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
