"""What a figure needs beside it."""

import os

from infra.machine import describe_machine


def test_a_machine_is_told_by_processor_cores_and_versions_and_by_the_gpu_that_computes_where_there_is_one():
    machine = describe_machine()
    assert machine["processor"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_gib"] > 0
    assert {"torch", "transformers"} <= machine["versions"].keys()
    assert describe_machine("NVIDIA H200") == machine | {"gpu": "NVIDIA H200"}
