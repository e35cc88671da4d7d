"""Publish the champion into a folder that others roll out from: a directory of its own, and a file that names it."""

from pathlib import Path

from infra.files import replacing
from infra.registry import open_registry
from models.types import Frozen
from tasks.export_draft import export_draft
from tasks.stages.task import task

POINTER = "champion.json"


class Published(Frozen):
    """What `champion.json` says.

    Attributes:
        version: the draft's number.
        digest: sha256 of its files in the registry.
        directory: the name of its directory, which is never changed.
    """

    version: int
    digest: str
    directory: str


@task
def publish_champion(folder: Path, target: str = "", licence: str = "") -> Published | None:
    """Write the champion's directory as `export_draft` does, unless it is there, and then name it in `champion.json`.

    Both are renamed into place, so that whoever copies the file first and then the directory gets the draft whole.

    Returns:
        What the file says now; None without a champion, which leaves the file as it is.

    Raises:
        ValueError: see `export_draft`.
        StoreUnavailable: the registry can't be asked.
    """
    if (champion := open_registry().champion("draft")) is None:
        return None
    published = Published(version=champion.number, digest=champion.sha256, directory=champion.sha256)
    if not (folder / published.directory).exists():
        export_draft.fn(champion.number, folder / published.directory, target, licence)
    pointer, content = folder / POINTER, published.model_dump_json() + "\n"
    if not pointer.exists() or pointer.read_text() != content:
        with replacing(pointer) as temporary:
            temporary.write_text(content)
            temporary.chmod(0o644)  # for whoever rolls it out
    return published
