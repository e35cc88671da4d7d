"""What is told of compiling while a service starts."""

import threading
from pathlib import Path

from infra import compiling
from infra.compiling import Compiling


def test_only_what_was_compiled_since_the_start_is_told_and_counted(tmp_path, monkeypatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(compiling.time, "monotonic", lambda: now_s)
    folder = tmp_path / "compiled"
    seen = Compiling(folder)  # the first start makes the folder
    now_s += 20.4
    assert seen.told() == "20 s"
    graph = folder / "torch_compile_cache" / "torch_aot_compile" / "0123"
    (graph / "inductor_cache" / "ab").mkdir(parents=True)
    (graph / "inductor_cache" / "ab" / "one.so").touch()
    (graph / "inductor_cache" / "ab" / "one.cpp").touch()
    assert seen.told() == "20 s, 1 kernel"
    (graph / "rank_0_0").mkdir()
    (graph / "rank_0_0" / "model").touch()
    (graph / "inductor_cache" / "two.so").touch()
    now_s += 60
    assert seen.told() == "80 s, 2 kernels, 1 model"
    assert Compiling(folder).told() == "0 s"


def test_folders_that_the_compiler_removes_meanwhile_do_not_fail_the_look(tmp_path: Path) -> None:
    seen, is_over = Compiling(tmp_path), threading.Event()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "one.so").touch()

    def build() -> None:
        while not is_over.is_set():
            for number in range(20):
                (tmp_path / f"{number}_CxxBuild").mkdir()
            for number in range(20):
                (tmp_path / f"{number}_CxxBuild").rmdir()

    compiler = threading.Thread(target=build)
    compiler.start()
    try:
        assert {seen.told().partition(", ")[2] for _ in range(500)} == {"1 kernel"}
    finally:
        is_over.set()
        compiler.join()
