"""An object store for tests: moto's server, as a process that can be stopped while it is asked."""

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from infra.processes import free_port
from infra.store import ObjectStore

NAME = "shared"
START_S = 120.0


class Bucket(NamedTuple):
    url: str
    process: "subprocess.Popen[bytes]"

    @classmethod
    @contextmanager
    def started(cls, log: Path) -> Iterator["Bucket"]:
        port = free_port("127.0.0.1")
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with log.open("wb") as file, subprocess.Popen(argv, stdout=file, stderr=file) as process:
            try:
                bucket = cls(f"http://127.0.0.1:{port}", process)
                until_s = time.monotonic() + START_S
                while not bucket._answers():
                    assert process.poll() is None and time.monotonic() < until_s, log.read_text()
                    time.sleep(0.1)
                yield bucket
            finally:
                process.kill()

    @property
    def address(self) -> str:
        return f"s3://{NAME}/redraft"

    @property
    def variables(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def empty(self) -> None:
        for method, path in (("POST", "moto-api/reset"), ("PUT", NAME)):
            self._ask(method, path)

    def names(self) -> list[str]:
        """Return the names of all objects below the address."""
        files = ObjectStore()._files
        return sorted(path.removeprefix(f"{NAME}/redraft/") for path in files.find(self.address))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let the server take connections and answer nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def _ask(self, method: str, path: str) -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/{path}", method=method), timeout=30):
            pass

    def _answers(self) -> bool:
        try:
            self._ask("GET", "moto-api/data.json")
        except (urllib.error.URLError, ConnectionError):
            return False
        return True
