"""What a service will run is compiled beside the build of its draft: what it finds, and where nothing is done."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.compiling import Compiling
from infra.home import compiled_folder
from infra.settings import Settings, load_settings
from models.engines.vllm import Params, child_environment
from models.recipe import Recipe, load_recipe
from tasks.stages import compiling as module
from tasks.stages.compiling import compiling
from tests.conftest import make_draft


@pytest.fixture(autouse=True)
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests on this machine hold, there is memory."""
    monkeypatch.setattr(module, "ROOM_GIB", 0.0)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings({"REDRAFT_HOME": str(tmp_path / "home")})


def compiled(**changed: object) -> Recipe:
    """Return a tiny recipe whose engine compiles."""
    recipe = load_recipe("tiny")
    changed = {"enforce_eager": False, "dtype": "float32", **changed}
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update=changed)})


@pytest.mark.parametrize(("eager", "device"), [(True, "cpu"), (False, "cuda")], ids=["eager", "on a GPU"])
def test_nothing_is_compiled_ahead_where_the_engine_does_not_compile_or_would_be_beside_another(
    settings: Settings, eager: bool, device: str
) -> None:
    recipe = compiled(enforce_eager=eager)
    with compiling(recipe, settings.model_copy(update={"device": device}), settings.home / "no target"):
        pass
    assert not settings.home.exists()


def test_nothing_is_compiled_ahead_where_a_service_has_compiled_or_memory_is_short(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as short:
        short.setattr(module, "ROOM_GIB", float("inf"))
        with compiling(compiled(), settings, tmp_path / "no target"):
            pass
    assert "the service compiles as it starts" in capsys.readouterr().out
    compiled_folder(settings.cache).mkdir(parents=True)
    with compiling(compiled(), settings, tmp_path / "no target"):
        pass
    assert not (settings.home / "logs").exists()


@pytest.mark.engine
def test_an_engine_with_another_draft_of_the_shape_finds_what_was_compiled_ahead(
    settings: Settings, tiny_target: Path, tmp_path: Path
) -> None:
    recipe = compiled()
    folder = compiled_folder(settings.cache)
    ahead = Compiling(folder)
    with compiling(recipe, settings, tiny_target):
        assert " model" not in ahead.told()  # it goes on beside the block
    assert " model" in ahead.told()
    assert isinstance(recipe.engine, Params)
    (tmp_path / "draft").mkdir()
    draft = make_draft(tiny_target, tmp_path / "draft", seed=3, vocab_size=128)
    served = Compiling(folder)
    argv = [sys.executable, "-m", "models.engines.vllm.precompile", "--target", str(tiny_target), "--draft", str(draft)]
    argv += ["--params", json.dumps(recipe.engine.model_dump(mode="json"))]
    environment = {**child_environment(recipe.engine), "VLLM_CACHE_ROOT": str(folder)}
    subprocess.run(argv, check=True, env={**os.environ, **environment}, timeout=300)
    assert " model" not in served.told()


@pytest.mark.engine
def test_where_it_fails_the_service_is_left_to_compile(
    settings: Settings, tiny_target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with compiling(compiled(extra={"block_size": -1}), settings, tiny_target):
        pass
    assert "nothing was compiled ahead" in capsys.readouterr().out
    assert "block_size" in (settings.home / "logs" / "compile.log").read_text()
