"""Parts of a step take their time, and a share of a layer is a smaller layer."""

from pathlib import Path

from transformers import AutoConfig

from models.targets import random
from tasks.measure import part_times


def test_all_parts_are_timed(tiny_target: Path) -> None:
    times = part_times.part_times(tiny_target)
    assert set(times.attention_ms) == set(times.mlp_ms) == set(part_times.DEVICES)
    assert times.rest_ms > 0 and times.meet_ms > 0
    line = times.cost.line(1)
    assert line is not None and line.target_ms(1) > 0


def test_a_device_holds_whole_heads_and_the_fullest_one_counts(tmp_path: Path) -> None:
    random.build(random.Params(num_heads=6, num_kv_heads=3), tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    shapes = []
    for number in part_times.DEVICES:
        part = part_times._decoder(config, number)
        shapes.append((part.num_heads, part.num_kv_heads, part.head_dim))
    assert shapes == [(6, 3, 64), (4, 2, 64), (2, 1, 64), (2, 1, 64)]
