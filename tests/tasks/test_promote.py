"""Promotion by hand, against a real registry."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.artifacts import staged
from infra.registry import Registry
from infra.versions import Version, is_quarantined
from tasks.promote import differences, promote_version, roll_back
from tests.tags import draft_tags

Register = Callable[..., Version]


@pytest.fixture
def register(registry: Registry, tmp_path: Path) -> Register:
    """Return what registers a draft; the first call registers the target too."""
    made: list[Path] = []

    def make(kind: str, **tags: str) -> Version:
        final = tmp_path / f"{kind} {len(made)}"
        made.append(final)
        with staged(final) as directory:
            (directory / "model.safetensors").write_text(final.name)
        return registry.register(kind, final, {**draft_tags(), "target_sha256": "a", "tau": "{}", **tags})

    registry.promote("target", make("target").number)
    return lambda **tags: make("draft", **{"gate": "passed", "gate_reasons": "", **tags})


def champion(registry: Registry) -> int | None:
    found = registry.champion("draft")
    return None if found is None else found.number


def test_a_draft_that_passed_is_promoted_and_one_that_did_not_needs_a_reason(
    registry: Registry, register: Register
) -> None:
    register()
    refused = register(gate="refused", gate_reasons="chat lost 9%")
    assert promote_version.fn(1).number == champion(registry) == 1
    with pytest.raises(ValueError, match=r"draft 2 passed no gate \(refused: chat lost 9%\).*--force"):
        promote_version.fn(refused.number)
    assert champion(registry) == 1
    promote_version.fn(refused.number, "chat is going away")
    assert champion(registry) == 2
    assert registry.get("draft", 2).tags["forced"] == "chat is going away"


@pytest.mark.parametrize(
    ("tags", "reason"),
    [
        ({"gate": ""}, r"passed no gate \(none\)"),
        ({"target_sha256": "b"}, "was made for target .* champion: that is 1"),
    ],
)
def test_what_was_never_judged_or_fits_another_target_stays_out(
    registry: Registry, register: Register, tags: dict[str, str], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        promote_version.fn(register(**tags).number)
    assert champion(registry) is None


def test_no_reason_promotes_a_quarantined_draft(registry: Registry, register: Register) -> None:
    registry.quarantine("draft", register().number, "another output")
    with pytest.raises(ValueError, match="quarantined: another output"):
        promote_version.fn(1, "I want it")


def test_rolling_back_leaves_the_draft_promotable_unless_a_reason_is_given(
    registry: Registry, register: Register
) -> None:
    for _ in range(3):
        promote_version.fn(register().number)
    assert roll_back.fn().number == champion(registry) == 2
    promote_version.fn(3)
    assert champion(registry) == 3
    assert roll_back.fn("slow on phones").number == 2
    assert is_quarantined(registry.get("draft", 3))
    assert roll_back.fn().number == 1
    with pytest.raises(ValueError, match="draft 1 has none before it"):
        roll_back.fn()
    assert champion(registry) == 1


def test_rolling_back_passes_over_quarantined_drafts(registry: Registry, register: Register) -> None:
    for _ in range(3):
        promote_version.fn(register().number)
    registry.quarantine("draft", 2, "bad")
    assert roll_back.fn().number == 1


def test_without_a_champion_there_is_nothing_to_go_back_from(registry: Registry) -> None:
    with pytest.raises(ValueError, match="there is no champion"):
        roll_back.fn()


def test_a_difference_names_both_values_and_leaves_out_what_is_equal(register: Register) -> None:
    window = {"window_first_seq": "1", "window_last_seq": "40", "window_sha256": "w"}
    first, second = register(parent=""), register(parent="1", **window)
    rows = differences(first, second)
    assert ("parent", "", "1") in rows
    assert ("window_last_seq", "", "40") in rows
    assert "target_sha256" not in [name for name, *_ in rows]
    assert [name for name, *_ in rows][:2] == ["parent", "window_first_seq"]
