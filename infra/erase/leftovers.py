"""What was computed from rows and can be computed again, or was left by a process that died."""

import json
from pathlib import Path

from infra.erase.job import Job
from infra.files import discard, files_under, lock_folder, sweep_staging
from infra.post_promotion import PostPromotionTests
from infra.querylog import CapturedFiles

STATES = "states.bin"
UNLOGGED_S = 60.0  # a row is logged within a second of its states


def remove_scores(job: Job) -> None:
    for file in sorted(_swept(job.settings.local_artifacts / "scores").glob("[!.]*/scores.json")):
        if any(score["id"] in job.ids for score in json.loads(file.read_bytes())):
            _remove(job, file.parent)


def remove_work(job: Job) -> None:
    """Remove work folders of dead runs that name the rows or hold hidden states; a live build reads no rows."""
    names = [name.encode() for name in job.ids]
    for folder in sorted(_swept(job.settings.local_artifacts / "work").glob("[!.]*")):
        with lock_folder(folder, wait_s=0) as is_free:
            if is_free and any(_is_of(file, names) for file in files_under(folder)):
                _remove(job, folder)


def remove_captured(job: Job) -> None:
    """Remove hidden states that were captured of the rows, and of rows that did not come to the log."""
    files = CapturedFiles(job.settings.beside_log)
    if files.forget(job.ids) + files.forget_others(job.log.ids(), UNLOGGED_S):
        job.keep(removed=tuple(dict.fromkeys((*job.certificate.removed, files.folder.name))))


def sweep_post_promotion(job: Job) -> None:
    PostPromotionTests(job.settings).sweep()


def _is_of(file: Path, names: list[bytes]) -> bool:
    if file.suffix not in (".jsonl", ".json"):
        return file.name == STATES
    content = file.read_bytes()
    return any(name in content for name in names)


def _remove(job: Job, directory: Path) -> None:
    name = directory.relative_to(job.settings.local_artifacts).as_posix()
    job.keep(removed=tuple(dict.fromkeys((*job.certificate.removed, name))))
    discard(directory)


def _swept(folder: Path) -> Path:
    if folder.is_dir():
        sweep_staging(folder)
    return folder
