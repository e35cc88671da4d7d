"""An object store that several machines reach: folders of files under `s3://bucket/prefix`.

What a folder is worth its readers decide; here bytes move. Objects appear whole, each by itself, so that the one that
is written last says that the others are there. Keys, region and endpoint are in the usual variables `AWS_*`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from infra.store import StoreUnavailable

SCHEME = "s3://"
# A store that does not answer must be noticed in seconds: nobody fetches while it is waited for.
CONNECT_S, READ_S, NUM_TRIES = 3, 5, 2
CHUNK_BYTES = 1 << 24


class ObjectsUnavailable(StoreUnavailable):
    """The object store could not be reached, or refused; the same call may succeed later."""


class ObjectMissing(ObjectsUnavailable):
    """The object store answers, and has no such object, or no such bucket."""


class ObjectStore:
    """Connects at first use; every call raises ObjectsUnavailable."""

    @cached_property
    def _files(self) -> Any:
        try:
            from s3fs import S3FileSystem  # an extra, and it takes a second
        except ImportError as error:
            raise ValueError(f"{SCHEME} needs s3fs, which is missing: pip install 'redraft[s3]'") from error

        config = {"connect_timeout": CONNECT_S, "read_timeout": READ_S, "retries": {"max_attempts": 0}}
        files = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
        files.retries = NUM_TRIES
        return files

    def upload(self, files: Sequence[tuple[Path, str]], folder: str) -> None:
        """Write files under their names in a folder, in the order given."""
        for path, name in files:
            with _reached(f"writing {folder}/{name}"):
                self._files.put_file(str(path), f"{folder}/{name}")

    def holds(self, address: str) -> bool:
        with _reached(f"looking for {address}"):
            return bool(self._files.exists(address))

    def chunks(self, address: str) -> Iterator[bytes]:
        """Yield the content of one object."""
        with _reached(f"reading {address}"):
            opened = self._files.open(address, "rb", block_size=CHUNK_BYTES, cache_type="readahead")
        with opened:
            while True:
                with _reached(f"reading {address}"):
                    chunk: bytes = opened.read(CHUNK_BYTES)
                if not chunk:
                    return
                yield chunk

    def folders(self, parent: str) -> list[str]:
        """Return the addresses of the folders in a folder, none where it is not there."""
        with _reached(f"listing {parent}"):
            if not self._files.exists(parent):
                return []
            return [f"{SCHEME}{path}" for path in self._files.ls(parent, detail=False)]

    def remove(self, folder: str, first: str) -> None:
        """Remove a folder, and one of its files before all others."""
        with _reached(f"removing {folder}"):
            if self._files.exists(f"{folder}/{first}"):
                self._files.rm_file(f"{folder}/{first}")
            if self._files.exists(folder):
                self._files.rm(folder, recursive=True)


@contextmanager
def _reached(doing: str) -> Iterator[None]:
    """Turn what s3fs and its libraries raise into ObjectsUnavailable."""
    from botocore.exceptions import BotoCoreError  # comes with s3fs

    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(f"{doing}: it is not there") from error
    except (OSError, BotoCoreError) as error:
        told = (str(error).splitlines() or [""])[0]
        raise ObjectsUnavailable(f"{doing}: {told or type(error).__name__}") from error
