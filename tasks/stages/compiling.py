"""The service's models, compiled beside the build of what they will serve."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from infra.compiling import Compiling
from infra.home import compiled_folder
from infra.machine import openmp_preload
from infra.priority import free_memory_gib
from infra.processes import Child, wait_until
from infra.service_process import START_TIMEOUT_S
from infra.settings import Settings
from infra.views.results import out, working
from models.core.drafting.draft_families import family_named
from models.engines.vllm import Params, child_environment
from models.recipe import Recipe
from models.targets import describe

ROOM_GIB = 10.0  # of free memory, for an engine beside the one that answers and what trains


@contextmanager
def compiling(recipe: Recipe, settings: Settings, target_dir: Path) -> Iterator[None]:
    """Compile what the service will run while the block builds it, and wait for that at the end.

    It is done once: nothing happens where a service of the home has compiled before, where nothing is compiled, on a
    GPU, or where memory is short. Where it fails, the service compiles as it starts.
    TimeoutError if it takes longer than a start of the service may.
    """
    engine, folder = recipe.engine, compiled_folder(settings.cache)
    # An engine takes most of a GPU's memory, and the build has one for its answers.
    if not isinstance(engine, Params) or engine.enforce_eager is True or folder.exists() or settings.device != "cpu":
        yield
        return
    if (free_gib := free_memory_gib()) < ROOM_GIB:
        out.print(f"{free_gib:.1f} GiB of memory are free, less than {ROOM_GIB:g}: the service compiles as it starts")
        yield
        return
    compiled, said = Compiling(folder), "compiling the models that will be served, once on this machine"
    with TemporaryDirectory() as draft:
        child = _start(recipe, engine, settings, target_dir, Path(draft))
        try:
            yield
            with working(said) as tell:

                def ended() -> bool:
                    tell(f"{said} ({compiled.told()})")
                    return child.poll() is not None

                wait_until(ended, START_TIMEOUT_S, None, "the compiler")
            if child.poll():
                out.print(f"nothing was compiled ahead, so the service will; see {child.log_path}")
        finally:
            child.stop()


def _start(recipe: Recipe, engine: Params, settings: Settings, target_dir: Path, draft: Path) -> Child:
    argv = [sys.executable, "-m", "models.engines.vllm.precompile", "--target", str(target_dir)]
    argv += ["--params", json.dumps(engine.model_dump(mode="json"))]
    if engine.num_draft_tokens:
        family = family_named(recipe.draft.name)
        counts = np.ones(describe(target_dir).vocab_size, dtype=np.int64)  # which tokens it knows is no matter
        family.save(family.create(recipe.draft, target_dir, counts), draft)
        argv += ["--draft", str(draft)]
    if recipe.serve.capture.is_on:
        argv += ["--captures"]
    cache = {"VLLM_CACHE_ROOT": str(compiled_folder(settings.cache))}
    environment = {**child_environment(engine), **openmp_preload(), **cache}
    return Child.start(argv, environment, settings.home / "logs" / "compile.log", "the compiler")
