"""Processes of Ray's train a module together, a lost one starts again from the checkpoint, and errors come back."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.core.learning.loop import Workers
from models.drafts import eagle3
from models.stages import Train
from tasks.stages.workers import train_module
from tests.models.drafts.answered import answers_of, prompts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("home")]

Show = Callable[[distill.Progress], None]
PARAMS = distill.Params(num_epochs=4, batch_tokens=120, num_threads=1, validation=0.2, checkpoint_s=0)


@pytest.fixture(scope="module")
def samples(tiny_target: Path) -> list[Sample]:
    return answers_of(tiny_target, prompts(19))


def new_head(target: Path, samples: list[Sample]) -> eagle3.Eagle3:
    counts = np.bincount(np.concatenate([s.token_ids for s in samples]), minlength=259)
    return eagle3.create(eagle3.Params(vocab_size=128), target, counts)


def in_a_fresh_process(check: Callable[..., None], *given: object) -> None:
    """Run a check where Ray was not imported: it reads the token that a cluster asks for then."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pool.submit(check, *given).result()


def test_a_lost_process_comes_back_and_the_draft_is_as_one_process_trains_it(
    tiny_target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    in_a_fresh_process(lose_a_process, tiny_target, samples, tmp_path)


def lose_a_process(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    lost, began = tmp_path / "lost", tmp_path / "began"

    def trained(settings: Train | None, name: str) -> tuple[distill.Report, dict[str, torch.Tensor], list[int]]:
        head, shown = new_head(tiny_target, samples), list[int]()
        (tmp_path / name).mkdir()

        def run(workers: Workers, folder: Path, show: Show) -> distill.Report:
            saved, number = workers.on_saved, 0

            def on_saved() -> None:
                nonlocal number
                saved()
                number += 1
                if workers.rank == 1 and number == 5 and not lost.exists():
                    lost.touch()
                    os._exit(1)

            if workers.size > 1:
                workers.on_saved = on_saved
            if workers.is_first and lost.exists() and (folder / "checkpoint.safetensors").exists():
                began.touch()
            state_out = folder / "state.safetensors"
            return distill.train(
                head, tiny_target, samples, PARAMS, 3, folder, on_progress=show, state_out=state_out, workers=workers
            )

        report = train_module(settings, head, run, tmp_path / name, lambda now: shown.append(now.done))
        assert (tmp_path / name / "state.safetensors").is_file()
        return report, {name: tensor.clone() for name, tensor in head.state_dict().items()}, shown

    one, alone, _ = trained(None, "one")
    two, together, shown = trained(Train(workers=2), "two")
    assert lost.exists() and began.exists()
    assert (two.num_steps, two.num_tokens, len(two.taus)) == (one.num_steps, one.num_tokens, len(one.taus))
    assert [loss for _, loss in two.losses] == pytest.approx([loss for _, loss in one.losses], abs=1e-3)
    assert [tau for _, tau in two.taus] == pytest.approx([tau for _, tau in one.taus], abs=0.05)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-2, atol=1e-3)
    assert shown


def test_an_error_that_would_come_again_is_not_tried_again(
    tiny_target: Path, samples: list[Sample], tmp_path: Path
) -> None:
    in_a_fresh_process(meet_a_nan, tiny_target, samples, tmp_path)


def meet_a_nan(tiny_target: Path, samples: list[Sample], tmp_path: Path) -> None:
    head, tried = new_head(tiny_target, samples), tmp_path / "tried"
    with torch.no_grad():
        head.midlayer["mlp"]["up_proj"].weight[0, 0] = float("nan")

    def run(workers: Workers, folder: Path, show: Show) -> distill.Report:
        with tried.open("a") as file:
            file.write(f"{workers.rank}")
        return distill.train(head, tiny_target, samples, PARAMS, 3, folder, workers=workers)

    with pytest.raises(FloatingPointError, match="the loss is nan at step 0"):
        train_module(Train(workers=2), head, run, tmp_path, lambda now: None)
    assert sorted(tried.read_text()) == ["0", "1"]
