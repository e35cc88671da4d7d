"""What is served is what the recipe is about: another recipe's target is refused, its own is not in any spelling."""

from pathlib import Path

import pytest

from flows.up import programs_of, start
from infra.artifacts import Artifact
from infra.manifest import write_manifest
from infra.processes import free_port
from infra.registry import Registry
from infra.service_process import Attached
from infra.settings import ATTACH_TOKEN, Settings, load_settings
from models.recipe import Recipe, load_recipe, shipped_recipes
from models.targets import pretrained, random
from models.targets.random import Params
from services.attach import AttachConfig
from services.config import read_as
from services.record import RecordConfig
from tasks.promote import configure_service
from tasks.register import register_target
from tests.tags import draft_tags
from tests.tasks.made import recipe_of

TINY = load_recipe("tiny")


@pytest.fixture
def served(registry: Registry, target: Artifact, tmp_path: Path) -> Artifact:
    """Return the files of the champion, which has a draft."""
    version = register_target.fn(TINY, target)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "model.safetensors").write_text("a draft")
    write_manifest(tmp_path / "draft")
    tags = draft_tags(target_sha256=version.target.sha256, target_version=str(version.number))
    draft = registry.register("draft", tmp_path / "draft", tags)
    registry.promote("target", version.number)
    registry.promote("draft", draft.number)
    return target


def having(target: object, **tables: object) -> Recipe:
    return TINY.model_copy(update={"target": target, **tables})


def test_a_recipe_whose_target_is_not_the_champions_is_refused_and_both_are_named(served: Artifact) -> None:
    other = having(random.Params(seed=7))
    both = r'target is {"target": {"name": "random", "seed": 7}}, but target 1, .* by {"target": {"name": "random"}}'
    with pytest.raises(ValueError, match=both):
        configure_service.fn(other)
    with pytest.raises(ValueError, match='"path": "/models/other"'):
        configure_service.fn(having(pretrained.Params(path="/models/other")))
    quantized = load_recipe("full-chain-tiny")
    with pytest.raises(ValueError, match='"quantize": {"method"'):
        configure_service.fn(having(TINY.target, text=quantized.text, quantize=quantized.quantize))


def test_the_recipe_that_it_was_built_by_is_served_whatever_else_it_says(served: Artifact) -> None:
    engine = TINY.engine.model_copy(update={"max_num_seqs": 3})
    for recipe in (TINY, having(Params(seed=0)), having(TINY.target, engine=engine, name="mine", text={})):
        assert configure_service.fn(recipe)["target_version"] == 1


def test_another_recipe_that_makes_the_same_files_is_served_once_it_was_built(
    served: Artifact, registry: Registry
) -> None:
    again = having(pretrained.Params(path="/models/moved"))
    with pytest.raises(ValueError, match="run: redraft build"):
        configure_service.fn(again)
    assert register_target.fn(again, served).number == register_target.fn(again, served).number == 1
    for recipe in (TINY, again):
        assert configure_service.fn(recipe)["target_version"] == 1


def test_a_target_that_no_recipe_is_known_to_have_made_is_refused(registry: Registry, served: Artifact) -> None:
    registry.tag(registry.get("target", 1), "made_by", "[]")
    with pytest.raises(ValueError, match="run: redraft build"):
        configure_service.fn(TINY)


def test_a_tag_of_the_registrys_own_is_set_by_nobody_else(registry: Registry, served: Artifact) -> None:
    with pytest.raises(ValueError, match="the registry sets the tag sha256 itself"):
        registry.tag(registry.get("target", 1), "sha256", "0" * 64)


def test_a_recipe_whose_engine_has_no_endpoint_starts_no_service(tmp_path: Path) -> None:
    tables, _, _ = shipped_recipes()["tiny"].read_text().partition("[serve]")
    file = tmp_path / "offline.toml"
    file.write_text(
        tables.replace('name = "vllm"', 'name = "torch"').replace("max_num_seqs = 16\nenforce_eager = true", "")
    )
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        configure_service.fn(recipe_of(engine={"name": "torch"}, serve=None, demo=None))
    with pytest.raises(ValueError, match='engine "torch" has no endpoint'):
        start(str(file), Settings(home=tmp_path / "home"))
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("models", [("target", "other"), ()])
def test_servers_of_others_are_followed_and_recorded_where_they_stand_for_a_service(
    served: Artifact, models: tuple[str, ...]
) -> None:
    servers, router = ("http://127.0.0.1:1", "http://127.0.0.1:2"), "https://127.0.0.1:3"
    attached = Attached(servers=servers, recorded=router, models=models, port=free_port(), server_cache="/mnt")
    found = {program.name: program for program in programs_of("tiny", load_settings(), attached)}
    assert [*found] == ["prefect", "mlflow", "attach", *(["record"] if models else []), "runner", "post-promotion"]
    follows = read_as(AttachConfig, Path(found["attach"].argv[-1]))
    assert (follows.servers, follows.server_cache) == (servers, "/mnt")
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
