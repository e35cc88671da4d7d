"""Training by several processes of a Ray cluster, through Ray Train's `TorchTrainer`, which starts a lost group again.

Ray's own variable `RAY_ADDRESS` names the cluster; without it Ray runs on this machine for as long as the training
does. What the processes need travels through Ray. The first one's checkpoints lie in the step's folder, which all nodes
must reach, and from the newest every process goes on.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from safetensors.torch import load_file, save_file
from torch import nn

from infra.home import home_secret, ray_folder
from infra.priority import NICENESS
from infra.settings import load_settings
from models.core.learning import hidden
from models.core.learning.loop import ALONE, Workers
from models.stages import Train

MAX_FAILURES = 3
OBJECT_STORE_BYTES = 512 << 20  # for a model and what it learns from
WEIGHTS = "weights.safetensors"
ProgressT = TypeVar("ProgressT")
T = TypeVar("T")
# Trains in one of the processes, given which, a folder that lasts for the run, and what takes how far it is.
Run = Callable[[Workers, Path, Callable[[ProgressT], None]], T]


def train_module(
    settings: Train | None, module: nn.Module, run: "Run[ProgressT, T]", work: Path, show: Callable[[ProgressT], None]
) -> T:
    """Train a module in place by `run`, here or in the processes that the settings ask for; return what it returned.

    `run` trains `module` itself, and may leave files in the folder that it is given; they lie in `work` then. There a
    run that was killed finds its checkpoint, too.

    Raises:
        ValueError, FloatingPointError: as `run`.
        RuntimeError: processes were lost more often than they are started again.
    """
    if settings is None:
        return run(ALONE, work, show)
    each: dict[str, float] = {"CPU": settings.cpus, **({"GPU": settings.gpus} if settings.gpus else {})}
    with _cluster(settings), _taken(show) as told:
        from ray import put  # not at the top: it takes seconds, and few recipes train like this
        from ray.train import FailureConfig, RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer

        trainer = TorchTrainer(
            _run,
            train_loop_config={
                "trained": put((module, run)),  # together, so that the one is still what the other trains
                "told": told,
                "work": str(work),
                "sharded": settings.sharded,
            },
            torch_config=TorchConfig(backend="nccl" if settings.gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=settings.workers, use_gpu=bool(settings.gpus), resources_per_worker=each
            ),
            run_config=RunConfig(
                name="train", storage_path=str(work), failure_config=FailureConfig(max_failures=MAX_FAILURES)
            ),
        )
        done: Any = trainer.fit()  # of Ray Train 2, which the declared type does not know
    if isinstance(done.return_value, Exception):
        raise done.return_value
    with done.checkpoint.as_directory() as left:
        shutil.copytree(left, work, dirs_exist_ok=True)
    module.load_state_dict(load_file(work / WEIGHTS))
    returned: T = done.return_value
    return returned


def _run(config: dict[str, Any]) -> Any:
    """Do one process's part, in that process; an error that would come again each time is returned."""
    import ray
    from ray import train

    context = train.get_context()
    rank, folder = context.get_world_rank(), Path(config["work"]) / f"worker-{context.get_world_rank()}"
    folder.mkdir(parents=True, exist_ok=True)
    if (last := train.get_checkpoint()) is not None:
        with last.as_directory() as left:
            shutil.copytree(left, folder, dirs_exist_ok=True)
    workers = Workers(rank, context.get_world_size(), config["sharded"], partial(_report, rank, folder))
    module, run = ray.get(config["trained"])
    try:
        returned = run(workers, folder, config["told"].put if workers.is_first else lambda progress: None)
    except (ValueError, FloatingPointError) as error:
        return error
    weights = {name: workers.whole(tensor).clone() for name, tensor in module.state_dict().items()}
    if workers.is_first:
        save_file(weights, folder / WEIGHTS)
    _report(rank, folder)
    return returned


def _report(rank: int, folder: Path) -> None:
    """Hand the first process's files to Ray Train, which waits for all of them."""
    from ray import train

    if rank:
        train.report({})
        return
    # Without the states, which are large and each process's own.
    with TemporaryDirectory(dir=folder.parent) as temporary:
        kept = Path(temporary) / "kept"
        shutil.copytree(folder, kept, ignore=shutil.ignore_patterns(hidden.FOLDER), copy_function=os.link)
        train.report({}, checkpoint=train.Checkpoint.from_directory(kept))


@contextmanager
def _cluster(settings: Train) -> Iterator[None]:
    """Be connected to the cluster, to one of this process alone on loopback if none is named."""
    named = "RAY_ADDRESS" in os.environ
    home = load_settings().home
    if not named:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": home_secret(home, "ray.key").hex()}
        os.environ.setdefault("RAY_worker_niceness", str(NICENESS))  # at Ray's 15 whatever is busy leaves 3% of a core
    import ray  # reads the variables when it is imported

    if named:
        ray.init(log_to_driver=False)
    else:
        num_cpus, num_gpus = (settings.workers * each for each in (settings.cpus, settings.gpus))
        ray.init(
            "local",
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=str(ray_folder(home)),
        )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _taken(show: Callable[[Any], None]) -> Iterator[Any]:
    """Yield a queue of Ray's; what any process puts there is shown in this one."""
    from ray.util.queue import Empty, Queue

    told, over = Queue(actor_options={"num_cpus": 0}), threading.Event()

    def take() -> None:
        while not over.is_set():
            try:
                show(told.get(timeout=0.5))
            except Empty:
                continue

    thread = threading.Thread(target=take, name="progress", daemon=True)
    thread.start()
    try:
        yield told
    finally:
        over.set()
        thread.join()
        told.shutdown()
