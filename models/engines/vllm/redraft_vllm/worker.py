"""An extension of vLLM's worker: stage a draft, commit it between two engine steps, verify what was loaded.

Each method runs on every rank by one `collective_rpc`, answers `{rank, ok, digest, error}` and raises nothing, because
an exception in a worker reads like a broken engine. Reading, hashing and checking happen in a thread, while the engine
runs its steps; a commit only loads. What was staged lies in memory, so a folder may vanish after that.
"""

import hashlib
import logging
import threading
from collections.abc import Callable
from functools import cached_property, wraps
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from . import WEIGHTS, sampling
from .swap import Parameters, WorkerDraft

START = "start-up"

log = logging.getLogger("vllm.redraft")
if not __name__.startswith("models.") and sampling.install():  # redraft's own engine has it as one of its patches
    log.warning("redraft put a sampling kernel in place that vLLM's CPU build lacks (vllm-project/vllm#55005)")


class Files(NamedTuple):
    """A draft's tensors, in memory, with the engine's parameters that are made of them."""

    version: str
    digest: str
    weights: dict[str, Tensor]
    parameters: Parameters


class Staging:
    """Reads and checks a draft in a thread."""

    def __init__(self, draft: WorkerDraft, loaded: Files | None, files: Files, path: str) -> None:
        """Begin to check files; without weights they are read from a folder before."""
        self.version, self.error = files.version, ""  # nothing is known against them
        self.files: Files | None = None  # once they are read and fit
        self.before = loaded  # what a commit replaces
        self._thread = threading.Thread(target=self._read, args=(draft, files, path), name="redraft-stage", daemon=True)
        self._thread.start()

    @property
    def reading(self) -> bool:
        """Whether nothing is known yet."""
        return self._thread.is_alive()

    def _read(self, draft: WorkerDraft, files: Files, path: str) -> None:
        try:
            if not files.weights:
                content = (Path(path) / WEIGHTS).read_bytes()
                if (digest := hashlib.sha256(content).hexdigest()) != files.digest:
                    raise ValueError(f"{WEIGHTS} of {path} has sha256 {digest}, wanted {files.digest}")
                files = files._replace(weights=load(content))
            draft.require_fit(files.weights, files.parameters)
            self.before = self.before or Files(START, "", draft.read_start(), files.parameters)
        except (ValueError, OSError, SafetensorError, MemoryError) as error:
            self.error = f"{type(error).__name__}: {error}"
        else:
            self.files = files


def answering(method: Callable[..., dict[str, Any] | None]) -> Callable[..., dict[str, Any]]:
    """Add rank and outcome to what a method answers."""

    @wraps(method)
    def answer(self: "DraftExtension", *args: Any) -> dict[str, Any]:
        loaded = self._redraft_loaded
        told = {"rank": self.rank, "ok": True, "error": "", "digest": "" if loaded is None else loaded.digest}
        try:
            return told | (method(self, *args) or {})
        except Exception as error:  # noqa: BLE001 - the edge: whatever goes wrong on one rank is told by it
            return told | {"ok": False, "error": f"{type(error).__name__}: {error}"}

    return answer


class DraftExtension:
    """What vLLM's worker can do with `--worker-extension-cls redraft_vllm.worker.DraftExtension`.

    vLLM makes it a base of its worker's class, so its names begin alike and nothing is set up at the start.
    """

    rank: int
    _redraft_loaded: Files | None = None
    _redraft_before: Files | None = None
    _redraft_staging: Staging | None = None

    @answering
    def redraft_stage(self, version: str, path: str, sha256: str, parameters: Parameters) -> None:
        """Begin to read a draft from a folder, see `Order`; `redraft_staged` tells when that is done.

        The path is "" for the draft that serves, or the one before.
        """
        weights: dict[str, Tensor] = {}
        if not path:
            kept = [self._redraft_loaded, self._redraft_before]
            weights = next((one.weights for one in kept if one is not None and one.digest == sha256), {})
            if not weights:
                raise ValueError(f"no draft with sha256 {sha256} is in memory")
        files = Files(version, sha256, weights, parameters)
        self._redraft_staging = Staging(self._redraft_draft, self._redraft_loaded, files, path)

    @answering
    def redraft_staged(self, version: str) -> dict[str, Any]:
        """Answer whether a draft that is being staged is still read, may be committed, or why it may not."""
        staging = self._redraft_find(version)
        if staging.reading:
            return {"reading": True}
        if staging.files is None:
            raise ValueError(staging.error)
        return {"reading": False, "digest": staging.files.digest}

    @answering
    def redraft_commit(self, version: str) -> dict[str, Any]:
        """Replace the draft by the one that was staged, and keep the one before it at hand for `redraft_revert`."""
        staging = self._redraft_find(version)
        if staging.reading or staging.files is None:
            raise ValueError(f"draft {version} is not staged")
        files = staging.files
        self._redraft_before, self._redraft_staging = staging.before, None
        self._redraft_draft.load(files.weights, files.parameters)
        self._redraft_loaded = files
        return {"digest": files.digest}

    @answering
    def redraft_revert(self) -> dict[str, Any]:
        """Load the draft again that the last commit replaced; a rank that did not begin it has nothing to do."""
        if self._redraft_staging is not None:
            return self.redraft_discard()
        if (before := self._redraft_before) is None:
            raise ValueError("no draft was replaced")
        self._redraft_draft.load(before.weights, before.parameters)
        self._redraft_loaded = before
        return {"version": before.version, "digest": before.digest}

    @answering
    def redraft_verify(self, parameter: str, staged: str = "") -> dict[str, Any]:
        """Answer by how much a parameter of the loaded draft is off from its file; "" for what vLLM derived from them.

        Where a version is named, from what is staged by that name.
        """
        files = self._redraft_find(staged).files if staged else self._redraft_loaded
        if files is None:
            raise ValueError("no draft was committed")
        draft = self._redraft_draft
        if not parameter:
            return {"worst": max(draft.derived_errors(files.weights).values(), default=0.0)}
        return {"worst": draft.parameter_error(files.weights, parameter, files.parameters[parameter])}

    @answering
    def redraft_discard(self) -> None:
        """Forget what is staged."""
        self._redraft_staging = None

    @cached_property
    def _redraft_draft(self) -> WorkerDraft:
        return WorkerDraft(self)

    def _redraft_find(self, version: str) -> Staging:
        staging = self._redraft_staging
        if staging is None or staging.version != version:
            raise ValueError(f"draft {version} is not staged")
        return staging
