"""What is told of a machine: what a figure needs beside it, what is installed, and which process is which."""

import os
import subprocess
from pathlib import Path

import pytest

from infra.machine import children_named, describe_machine, openmp_preload, process_identity, version_of
from infra.processes import wait_until


def test_a_machine_is_told_by_processor_cores_and_versions_and_by_the_gpu_that_computes_where_there_is_one():
    machine = describe_machine()
    assert machine["processor"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_gib"] > 0
    assert {"torch", "transformers"} <= machine["versions"].keys()
    assert describe_machine("NVIDIA H200") == machine | {"gpu": "NVIDIA H200"}


def test_an_identity_belongs_to_one_living_process() -> None:
    own = process_identity(os.getpid())
    other = subprocess.Popen(["sleep", "60"])
    assert own == process_identity(os.getpid()) != process_identity(other.pid)
    other.kill()
    wait_until(lambda: process_identity(other.pid) is None, 60, None, "the zombie")
    other.wait()
    assert process_identity(other.pid) is None


def test_children_are_found_by_their_name_while_they_live() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert children_named("sleep", "raylet")[child.pid] == process_identity(child.pid)
        assert children_named("raylet") == {}
        child.kill()
        wait_until(lambda: child.pid not in children_named("sleep"), 60, None, "its end")


def test_the_openmp_library_is_preloaded_first_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    library = openmp_preload()["LD_PRELOAD"]
    assert Path(library).is_file()
    monkeypatch.setenv("LD_PRELOAD", f"/other.so:{library}")
    assert openmp_preload() == {"LD_PRELOAD": f"{library}:/other.so"}


def test_what_is_not_installed_has_no_version() -> None:
    assert version_of("no-such-distribution") is None
    assert version_of("ray") is not None
