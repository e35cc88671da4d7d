"""What a figure needs beside it."""

import os

from infra.machine import describe_machine


def test_a_machine_is_told_by_processor_cores_and_versions():
    machine = describe_machine()
    assert machine["processor"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_gib"] > 0
    assert {"torch", "transformers"} <= machine["versions"].keys()


def test_the_gpu_that_computes_is_told_where_there_is_one():
    assert describe_machine("NVIDIA H200")["gpu"] == "NVIDIA H200"
    assert "gpu" not in describe_machine()
