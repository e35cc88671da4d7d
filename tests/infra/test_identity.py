import os
import subprocess

from infra.identity import children_named, process_identity
from infra.processes import wait_until


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
