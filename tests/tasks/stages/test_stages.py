"""Stages: made once, checked before use, made anew when anything they depend on changed."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from infra.artifacts import Artifact
from models.core.evaluation import gate
from tasks import stages
from tasks.stages import cached_step, code_version, local_content, planning, progress, stage_key


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


def test_a_stage_is_made_once_for_its_params_and_the_content_of_its_inputs():
    maker = Maker()
    first = make(maker)
    assert (make(maker), maker.times) == (first, 1)
    make(maker, params=2)
    make(maker, before=first)
    make(maker, before=first.model_copy(update={"sha256": "0" * 64}))
    make(maker, before=first.model_copy(update={"uri": "file:///elsewhere"}))  # made already
    assert maker.times == 4


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


@pytest.fixture
def write(tmp_path, monkeypatch) -> Callable[..., None]:
    """Return what writes modules of a tree of their own."""
    monkeypatch.setattr(stages, "ROOT", tmp_path)

    def files(**modules: str) -> None:
        for name, text in modules.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    return files


def test_the_version_of_code_follows_imports_but_not_comments(write):
    write(models__outer="from models import inner", models__inner="a = 1")
    before = code_version("models.outer")
    write(models__inner="a = 1  # one")
    assert code_version("models.outer") == before
    write(models__inner="a = 2")
    assert code_version("models.outer") != before


def test_the_version_of_code_leaves_out_the_schema_of_recipes(write):
    write(tasks__train="from models.recipe import Recipe\nfrom models.stages import Text")
    write(models__recipe="port = 1", models__stages="num_rounds = 1")
    before = code_version("tasks.train")
    write(models__recipe="port = 2", models__stages="num_rounds = 2")
    assert code_version("tasks.train") == before


def test_the_key_follows_the_methods_that_the_params_name(write):
    methods = ("models__losses__forward_kl", "models__losses__jsd", "models__verify__rejection")
    write(models__first="a = 1", **dict.fromkeys(methods, "a = 1"))
    params = {"distill": {"loss": {"name": "forward_kl"}}, "rules": [{"name": "rejection"}], "domains": {"jsd": "name"}}
    keys = [stage_key("s", params, {}, (ModuleType("models.first"),))]
    for method in methods:
        write(**{method: "a = 2"})
        keys.append(stage_key("s", params, {}, (ModuleType("models.first"),)))
    before, loss, other, rule = keys
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


def test_without_a_terminal_a_line_says_how_long_what_is_left_takes(monkeypatch, caplog):
    monkeypatch.setattr(stages, "LINE_S", 0)
    clock = iter(range(0, 10_000, 60))
    monkeypatch.setattr(stages, "time", type("Clock", (), {"monotonic": lambda: next(clock)}))
    caplog.set_level("INFO", "redraft")
    with progress("train") as show:
        for done, total in ((100, 1000), (400, 1000), (0, 4000), (1, 4000), (4000, 4000)):
            show(done, total, "tokens")
    assert caplog.messages == [
        "train: 100 of 1000, tokens",
        "train: 400 of 1000, tokens, 2 min left",  # 300 a minute
        "train: 0 of 4000, tokens",  # another total begins anew
        "train: 1 of 4000, tokens, 3 d left",
        "train: 4000 of 4000, tokens, 0 s left",
    ]
