"""Promotion by hand, and what is served: its own recipe's target in any spelling, and no other; a real registry."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.up import programs_of, start
from infra.artifacts import Artifact
from infra.processes import free_port
from infra.registry import Registry
from infra.service_process import Attached
from infra.settings import ATTACH_TOKEN, Settings, load_settings
from infra.versions import Version, is_quarantined
from models.recipe import Recipe, load_recipe, toml
from models.targets import pretrained, random
from models.types import Kind
from services.attach import AttachConfig
from services.config import read_as
from services.record import RecordConfig
from tasks.check_recipe import configure_service
from tasks.promote import differences, promote_version, roll_back
from tasks.register import register_target
from tests.tags import register as register_made
from tests.tasks.made import TABLES

Register = Callable[..., Version]
TINY = load_recipe("tiny")


@pytest.fixture
def register(registry: Registry, tmp_path: Path) -> Register:
    """Return what registers a draft of a registered target, which passed its gate."""

    def make(kind: Kind, **tags: str) -> Version:
        return register_made(registry, kind, tmp_path, **{"target_sha256": "a", "tau": "{}", **tags})

    registry.promote("target", make("target").number)
    return lambda **tags: make("draft", **{"gate": "passed", "gate_reasons": "", **tags})


def champion(registry: Registry) -> int | None:
    found = registry.champion("draft")
    return None if found is None else found.number


@pytest.mark.slow
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


def test_a_difference_names_both_values_and_leaves_out_what_is_equal(register: Register) -> None:
    window = {"window_first_seq": "1", "window_last_seq": "40", "window_sha256": "w"}
    first, second = register(parent=""), register(parent="1", **window)
    rows = differences(first, second)
    assert ("parent", "", "1") in rows
    assert ("window_last_seq", "", "40") in rows
    assert "target_sha256" not in [name for name, *_ in rows]
    assert [name for name, *_ in rows][:2] == ["parent", "window_first_seq"]


@pytest.fixture
def served(registry: Registry, target: Artifact, tmp_path: Path) -> Artifact:
    """Return the files of the champion, which has a draft."""
    version = register_target.fn(TINY, target)
    tags = {"target_sha256": version.target.sha256, "target_version": str(version.number)}
    registry.promote("target", version.number)
    registry.promote("draft", register_made(registry, "draft", tmp_path, **tags).number)
    return target


def having(target: object, **tables: object) -> Recipe:
    return TINY.model_copy(update={"target": target, **tables})


def test_a_recipe_whose_target_is_not_the_champions_is_refused_and_both_are_named(served: Artifact) -> None:
    quantized = load_recipe("full-chain-tiny")
    for recipe, told in (
        (
            having(random.Params(seed=7)),
            r'{.*"seed": 7}}, but target 1, .* by {"target": {"name": "random"}}',
        ),
        (having(pretrained.Params(path="/models/other")), '"path": "/models/other"'),
        (having(TINY.target, text=quantized.text, quantize=quantized.quantize), '"quantize": {"method"'),
    ):
        with pytest.raises(ValueError, match=told):
            configure_service.fn(recipe)


def test_the_recipe_that_it_was_built_by_is_served_whatever_else_it_says(served: Artifact) -> None:
    engine = TINY.engine.model_copy(update={"max_num_seqs": 3})
    for recipe in (TINY, having(random.Params(seed=0)), having(TINY.target, engine=engine, name="mine", text={})):
        assert configure_service.fn(recipe)["target_version"] == 1


def test_what_the_target_can_not_do_starts_no_service(served: Artifact) -> None:
    engine = TINY.engine.model_copy(update={"max_model_len": 8192})
    with pytest.raises(ValueError, match="max_model_len is 8192; the target reads 2048 tokens at most"):
        configure_service.fn(having(TINY.target, engine=engine))


def test_another_recipe_that_makes_the_same_files_is_served_once_it_was_built_and_none_that_is_not_known(
    served: Artifact, registry: Registry
) -> None:
    again = having(pretrained.Params(path="/models/moved"))
    with pytest.raises(ValueError, match="run: redraft build --recipe FILE"):
        configure_service.fn(again)
    assert register_target.fn(again, served).number == register_target.fn(again, served).number == 1
    for recipe in (TINY, again):
        assert configure_service.fn(recipe)["target_version"] == 1
    registry.tag(registry.get("target", 1), "made_by", "[]")
    with pytest.raises(ValueError, match="run: redraft build --recipe FILE"):
        configure_service.fn(TINY)
    with pytest.raises(ValueError, match="the registry sets the tag sha256 itself"):
        registry.tag(registry.get("target", 1), "sha256", "0" * 64)


def test_a_recipe_whose_engine_has_no_endpoint_starts_no_service(tmp_path: Path) -> None:
    offline = {name: table for name, table in TABLES.items() if name not in ("serve", "demo")}
    file = tmp_path / "offline.toml"
    file.write_text(toml(offline | {"engine": {"name": "torch"}}))
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        configure_service.fn(load_recipe(str(file)))
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        start(str(file), Settings(home=tmp_path / "home"))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("models", [("target", "other"), ()])
def test_servers_of_others_are_followed_and_recorded_where_they_stand_for_a_service(
    served: Artifact, models: tuple[str, ...]
) -> None:
    servers, router = ("http://127.0.0.1:1", "http://127.0.0.1:2"), "https://127.0.0.1:3"
    attached = Attached(servers=servers, recorded=router, models=models, port=free_port(), server_cache="/mnt")
    attached = attached.model_copy(update={"read_metrics": not models})
    found = {program.name: program for program in programs_of("tiny", load_settings(), attached)}
    assert [*found] == ["prefect", "mlflow", "attach", *(["record"] if models else []), "runner", "post-promotion"]
    follows = read_as(AttachConfig, Path(found["attach"].argv[-1]))
    assert (follows.servers, follows.server_cache, follows.read_metrics) == (servers, "/mnt", not models)
    assert ("--imported" in found["post-promotion"].argv) == follows.read_metrics
    assert "--imported" not in found["runner"].argv
    assert follows.orchestrator == f"{found['prefect'].url}/api"
    assert set(found["runner"].after) <= {*found}
    if models:
        records = read_as(RecordConfig, Path(found["record"].argv[-1]))
        assert (records.server, records.models, records.port) == (router, models, attached.port)
        assert (records.target_dir, records.target_version) == (follows.target_dir, follows.target_version)


def test_without_the_servers_token_nothing_is_brought_up(served: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ATTACH_TOKEN, raising=False)
    attached = Attached(servers=("http://127.0.0.1:1",), recorded="http://127.0.0.1:1", models=(), port=1)
    with pytest.raises(ValueError, match=ATTACH_TOKEN):
        start("tiny", load_settings(), attached)
