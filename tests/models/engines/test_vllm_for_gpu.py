"""What an engine is told for a GPU, seen without one. None of it was run on a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from models.core.throughput import costfile
from models.core.throughput.cost import Cost, Time
from models.engines.vllm import Params
from models.engines.vllm.fields import Setup
from models.engines.vllm.launch import Speculation
from models.engines.vllm.measuring import Times, measured_for, place_of

PLACES: list[tuple[str, dict[str, Any]]] = [
    ("cpu", {}),
    ("cpu", {"tensor_parallel_size": 2}),
    ("NVIDIA L4", {}),
    ("NVIDIA H200", {}),
    ("NVIDIA H200", {"tensor_parallel_size": 2}),
    ("NVIDIA H200", {"pipeline_parallel_size": 2}),
]


def planned(target: Path, draft: Path, costs: Path, accelerator: str, extra: dict[str, Any]) -> Setup:
    params = Params(extra=extra)
    place = place_of(params, accelerator)
    _, setup = Speculation(target, draft, params, "bfloat16", True, costs, place=place).arguments()
    assert setup is not None
    return setup


def test_a_table_of_costs_is_that_of_one_accelerator_and_one_parallel_size(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    setups = [planned(tiny_target, tiny_draft, tmp_path, *place) for place in PLACES]
    assert len({setup.costs for setup in setups}) == len(PLACES)
    for setup in setups:
        assert setup.costs is not None
        costfile.save(Cost.measured([Time(1, 1, 0, 10.0)], setup.measured_for), setup.costs)
        assert setup.known_cost() is not None
        others = [replace(other, costs=setup.costs) for other in setups if other is not setup]
        assert all(other.known_cost() is None for other in others)  # a file that was copied tells of itself
    more = planned(tiny_target, tiny_draft, tmp_path, "cpu", {"gpu_memory_utilization": 0.8})
    assert more.costs == setups[0].costs


def test_a_mode_is_chosen_by_times_of_the_same_accelerator_and_parallel_size(tiny_target: Path, tmp_path: Path) -> None:
    times = []
    for accelerator, extra in PLACES:
        place = place_of(Params(extra=extra), accelerator)
        facts = measured_for(tiny_target, None, "bfloat16", True, "1", place=place)
        times.append(Times(tmp_path, {True: facts}))
    times[0].keep(True, 12.5)
    assert [one.plain_ms(True) for one in times] == [12.5, *[None] * (len(PLACES) - 1)]
