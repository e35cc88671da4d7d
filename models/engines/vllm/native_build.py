"""Operators of our own in C++, compiled for the processor at hand by the compiler that torch's graphs need as well."""

import hashlib
import logging
import os
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils import cpp_extension

from models.core.layers import quantized_weights

# The operators: attention layers in one call, products of few rows, all passes of a draft in one call, what is drawn.
ATTENTION, FEW_ROWS, FUSED_EAGLE3, SAMPLING = (
    Path(__file__).with_name("patches") / f"{name}.cpp"
    for name in ("attention", "small_batch_gemm", "fused_eagle3", "sampling")
)
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fPIC", "-Wno-psabi")
# Linked without OpenMP's library: the process has one, and threads of a second would fight its own for the cores.
OPENMP = "-fopenmp"
LIBRARIES = ("c10", "torch_cpu", "torch")
# Set for the processes of an engine on a CPU, where vLLM's own variable puts kernels for GPUs in place.
INVARIANT = "CPU_BATCH_INVARIANT"

log = logging.getLogger(__name__)


def load(source: Path, folder: Path, flags: tuple[str, ...] = FLAGS) -> None:
    """Compile a file, unless a library for this processor and torch lies in the folder, and load its operators.

    ValueError if it does not compile, OSError if there is no compiler or library, or the folder can't be written.
    """
    library = folder / f"{source.stem}-{_digest(source, flags)}.so"
    if not library.is_file():
        start_s = time.monotonic()
        _compile(source, library, flags)
        log.info("compiled %s in %.0f s", source.name, time.monotonic() - start_s)
    torch.ops.load_library(library)


def is_loaded(source: Path, without: str) -> bool:
    """Load a file's operators; where that can't be, warn of what is done without them.

    They lie in torch's folder of extensions, which a home has for itself; where it can't be written, in vLLM's.
    """
    from vllm import envs

    shared = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    try:
        try:
            load(source, Path(shared, "redraft"))
        except OSError:
            load(source, Path(envs.VLLM_CACHE_ROOT))
    except (OSError, ValueError) as error:
        log.warning("%s: %s", without, error)
        return False
    return True


def version(source: Path) -> str:
    """Return what tells a file's operators from those of its other versions."""
    return f"{source.name} {hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"


def is_batch_invariant() -> bool:
    """Whether the engine of this process is; see `patches.batch_invariance`."""
    return os.environ.get(INVARIANT) == "1"


def kernel_for(target: Path) -> str:
    """Return what tells the kernel that products with a target's weights may use from others; "" for oneDNN's alone.

    Graphs that were compiled and times that were measured hold for it.
    """
    kernel = f"{version(FEW_ROWS)}, drafts in 8 bits" if (target / quantized_weights.FILE).is_file() else ""
    return f"{kernel}, all rows alike" if is_batch_invariant() else kernel


def _compile(source: Path, library: Path, flags: tuple[str, ...]) -> None:
    """Write the library whole or not at all, whoever else does so at the same time."""
    library.parent.mkdir(parents=True, exist_ok=True)
    compiler = cpp_extension.get_cxx_compiler()
    includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()] + [f"-l{name}" for name in LIBRARIES]
    with TemporaryDirectory(dir=library.parent) as own:
        compiled, linked = Path(own, "compiled.o"), Path(own, library.name)
        _run([compiler, *flags, OPENMP, *includes, "-c", source, "-o", compiled])
        _run([compiler, "-shared", compiled, *libraries, "-o", linked])
        linked.replace(library)


def _run(command: list[str | Path]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError(f"{command[0]} ended with {ended.returncode}: {ended.stderr.strip()[-2000:]}")


def _digest(source: Path, flags: tuple[str, ...]) -> str:
    facts = (source.read_text(), flags, torch.__version__, sorted(torch.cpu.get_capabilities().items()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
