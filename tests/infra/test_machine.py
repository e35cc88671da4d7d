"""What a figure needs beside it."""

import os

from infra.machine import describe_machine, free_memory_gib


def test_a_machine_is_told_by_processor_cores_and_versions():
    machine = describe_machine()
    assert machine["processor"]
    assert machine["cores"] == len(os.sched_getaffinity(0))
    assert machine["memory_gib"] > 0
    assert {"torch", "transformers"} <= machine["versions"].keys()


def test_free_memory_is_some_and_not_more_than_there_is():
    assert 0 < free_memory_gib() <= describe_machine()["memory_gib"]
