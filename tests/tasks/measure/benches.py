"""Targets and texts for tests of what is measured."""

from pathlib import Path

import torch

from models.core.layers.decoder import Decoder
from tasks.measure.comparisons import Bench
from tasks.measure.configurations import Target

Texts = dict[str, list[list[int]]]


def random_texts(count: int, length: int, domains: tuple[str, ...] = ("chat",), end: int = 259, seed: int = 0) -> Texts:
    """Return so many documents of each domain, of token ids below `end`."""
    rng = torch.Generator().manual_seed(seed)
    return {domain: torch.randint(3, end, (count, length), generator=rng).tolist() for domain in domains}


def counting(step: int, count: int, length: int) -> list[list[int]]:
    """Return documents that count in steps, each from another start."""
    return [[3 + (start + step * place) % 60 for place in range(length)] for start in range(count)]


def bench_of(target: Path, work_dir: Path, draft: Path | None = None, end: int = 67, budget: float = 0.05) -> Bench:
    texts = random_texts(8, 24, end=end)
    return Bench(target, texts, texts, budget, work_dir, draft)


def open_target(target: Path, draft: Path, max_model_len: int) -> Target:
    """Return a target as the reference engine's configurations decode it, in float32."""
    shared = {"dtype": "float32", "max_model_len": max_model_len}
    return Target(target, Decoder.load(target, torch.float32), draft, shared)
