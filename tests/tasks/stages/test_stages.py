"""Stages: made once, checked before use, made anew when anything they depend on changed."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from infra.artifacts import Artifact
from models.core.evaluation import gate
from tasks import stages
from tasks.stages import cached_step, code_version, local_content, planning, stage_key


@pytest.fixture(autouse=True)
def artifacts(tmp_path, monkeypatch) -> Path:
    """Return the folder of artifacts of this test's home."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    return tmp_path / "artifacts"


class Maker:
    """Writes a file, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, directory: Path, work: Path) -> None:
        self.times += 1
        (work / "half").write_text("x")
        (directory / "file").write_text("content")


def make(maker: object, params: object = 1, **inputs: Artifact) -> Artifact:
    return cached_step("stage", "kind", params, maker, inputs, (gate,))


def test_a_stage_is_made_once():
    maker = Maker()
    assert make(maker) == make(maker)
    assert maker.times == 1


def test_a_plan_finds_what_was_made_up_to_what_was_not_and_makes_nothing(artifacts):
    maker, found = Maker(), dict[str, str]()
    first = make(maker)
    with planning(found):
        assert make(maker) == first
        make(maker, before=first)
        raise AssertionError("the plan went on without a result")
    assert (maker.times, found) == (1, {"stage": first.path.name})
    assert [*(artifacts / "work").iterdir()] == []
    make(maker, before=first)  # after a plan, steps are run again
    assert maker.times == 2


def test_other_params_and_other_inputs_are_other_stages():
    maker = Maker()
    first = make(maker)
    make(maker, params=2)
    make(maker, before=first)
    make(maker, before=first.model_copy(update={"sha256": "0" * 64}))
    assert maker.times == 4


@pytest.mark.parametrize("damage", [lambda file: file.write_text("contenu"), lambda file: file.unlink()])
def test_a_damaged_stage_is_made_anew(damage):
    maker = Maker()
    artifact = make(maker)
    damage(artifact.path / "file")
    assert make(maker) == artifact
    assert maker.times == 2


def test_work_is_kept_until_the_stage_is_complete(artifacts):
    def stopped(directory: Path, work: Path) -> None:
        (work / "half").write_text("done")
        raise KeyboardInterrupt

    def resumed(directory: Path, work: Path) -> None:
        (directory / "file").write_text((work / "half").read_text())

    with pytest.raises(KeyboardInterrupt):
        make(stopped)
    assert list((artifacts / "stage").iterdir()) == []
    assert (make(resumed).path / "file").read_text() == "done"
    assert list((artifacts / "work").iterdir()) == []


def test_of_two_that_make_a_stage_at_once_one_makes_it_and_both_have_it(artifacts):
    begun, waiting, maker = threading.Event(), threading.Event(), Maker()

    def slow(directory: Path, work: Path) -> None:
        begun.set()
        waiting.wait(60)
        maker(directory, work)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make, slow)
        begun.wait(60)
        second = pool.submit(make, slow)
        time.sleep(0.2)  # it waits for the first one's folder
        waiting.set()
        assert first.result() == second.result()
    assert maker.times == 1
    assert list((artifacts / "work").iterdir()) == []


def test_where_an_input_lies_makes_no_difference():
    inputs = [Artifact(uri=f"file:///{name}", sha256="0" * 64, kind="k") for name in "ab"]
    keys = {stage_key("s", 1, {"input": artifact}, (gate,)) for artifact in inputs}
    assert len(keys) == 1


def test_the_version_of_code_follows_imports_but_not_comments(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "outer.py").write_text("from models import inner\n")
    (tmp_path / "models" / "inner.py").write_text("a = 1\n")
    before = code_version("models.outer")
    (tmp_path / "models" / "inner.py").write_text("a = 1  # one\n")
    assert code_version("models.outer") == before
    (tmp_path / "models" / "inner.py").write_text("a = 2\n")
    assert code_version("models.outer") != before


def test_the_version_of_code_leaves_out_the_schema_of_recipes(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    for folder in ("models", "tasks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tasks" / "train.py").write_text("from models.recipe import Recipe\nfrom models.stages import Text\n")
    (tmp_path / "models" / "recipe.py").write_text("port = 1\n")
    (tmp_path / "models" / "stages.py").write_text("num_rounds = 1\n")
    before = code_version("tasks.train")
    (tmp_path / "models" / "recipe.py").write_text("port = 2\n")
    (tmp_path / "models" / "stages.py").write_text("num_rounds = 2\n")
    assert code_version("tasks.train") == before


def test_the_key_follows_the_methods_that_the_params_name(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    for folder in ("losses", "verify"):
        (tmp_path / "models" / folder).mkdir(parents=True)
    (tmp_path / "models" / "first.py").write_text("a = 1\n")
    methods = [tmp_path / "models" / name for name in ("losses/forward_kl.py", "losses/jsd.py", "verify/rejection.py")]
    params = {"distill": {"loss": {"name": "forward_kl"}}, "rules": [{"name": "rejection"}], "domains": {"jsd": "name"}}

    def keys() -> Iterator[str]:
        yield stage_key("s", params, {}, (ModuleType("models.first"),))
        for number, method in enumerate(methods):
            method.write_text(f"a = {number + 2}\n")
            yield stage_key("s", params, {}, (ModuleType("models.first"),))

    for method in methods:
        method.write_text("a = 1\n")
    before, loss, other, rule = keys()
    assert before != loss
    assert loss == other
    assert other != rule


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_another_version_of_a_library_that_computes_makes_a_stage_anew(library, monkeypatch):
    key = stage_key("s", 1, {}, (gate,))
    version = stages.version
    monkeypatch.setattr(stages, "version", lambda name: "99.0" if name == library else version(name))
    assert stage_key("s", 1, {}, (gate,)) != key


def test_a_module_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match='no module "models.gaet"'):
        code_version("models.gaet")


def test_what_lies_on_this_machine_counts_by_its_content(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    file, folder = local_content(str(tmp_path / "a.txt")), local_content(str(tmp_path))
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert local_content(str(tmp_path / "b.txt")) == file
    assert local_content(str(tmp_path)) != folder
    (tmp_path / "b.txt").write_text("b")
    assert local_content(str(tmp_path / "b.txt")) != file
    assert local_content("Qwen/Qwen3-8B") == local_content("") == {}
