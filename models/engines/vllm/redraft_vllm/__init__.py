"""Replace the draft of a stock `vllm serve` while it serves: a distribution of its own, which vLLM loads as a plugin.

    VLLM_PLUGINS=redraft,redraft_notice REDRAFT_ATTACH_TOKEN=… vllm serve TARGET \
        --worker-extension-cls redraft_vllm.worker.DraftExtension --speculative-config '{"model": "DIRECTORY", …}'

- `swap`: how a worker's draft is replaced and what its modules compute, for the embedded engine as well;
- `worker`: the extension of vLLM's worker: stage, commit, verify, each on every rank;
- `swapper`: what the ranks are told one after the other, for the embedded engine as well, and the fetching of a file;
- `routes`: `POST` and `GET /redraft/draft`;
- `served`: which server and draft gave an answer, told with it;
- `sampling`: the kernel that vLLM's CPU build lacks.

It imports torch, safetensors, what vLLM brings, and nothing else of redraft. Tried with vLLM 0.32; the sources of
`OLDEST` have all that it uses. The distribution requires no vLLM, because vLLM's has another name for each device.
"""

import hashlib
import logging
import os
from importlib.metadata import entry_points
from pathlib import Path

ROUTES, EXTENSION, WEIGHTS = "redraft", "redraft_vllm.worker.DraftExtension", "model.safetensors"
OLDEST = (0, 31)
GROUPS = ("vllm.general_plugins", "vllm.endpoint_plugins")

log = logging.getLogger("vllm.redraft")


def too_old() -> str:
    """Return why the installed vLLM can't be used, "" if it can; a build that does not know its version is taken."""
    from vllm import __version__, __version_tuple__

    oldest = ".".join(map(str, OLDEST))
    return f"vLLM {__version__} is older than {oldest}" if (0, 0) < __version_tuple__[:2] < OLDEST else ""


def file_digest(file: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()  # Python 3.10 has no `hashlib.file_digest`
    with file.open("rb") as content:
        while block := content.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def announce() -> None:
    """Say which plugins VLLM_PLUGINS leaves out, and if vLLM is too old; vLLM calls it in each of its processes."""
    if old := too_old():
        log.error("redraft can't replace drafts of this server: %s", old)
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is None:
        log.warning("redraft's routes are not loaded: vLLM loads routes only of plugins that VLLM_PLUGINS names")
        return
    names = {name.strip() for name in allowed.split(",")}
    if dropped := sorted({one.name for group in GROUPS for one in entry_points(group=group)} - names):
        log.warning("VLLM_PLUGINS=%s leaves out the plugins %s", allowed, ", ".join(dropped))
