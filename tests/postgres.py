"""A Postgres server of the tests' own: a temporary folder, a socket in it, and no port."""

import os
import pwd
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

DEBIAN = Path("/usr/lib/postgresql")
OPTIONS = "-c listen_addresses='' -c max_connections=60"


def find_binaries() -> Path | None:
    """Return the folder of `initdb` and `pg_ctl`; None where there are none."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    return next((file.parent for file in sorted(DEBIAN.glob("*/bin/initdb"), reverse=True)), None)


class PostgresServer:
    """Started when entered; it runs as another user where the tests run as root, which Postgres refuses.

    It need not be `durable` for tests, which end processes and not machines.
    """

    def __init__(self, durable: bool = False) -> None:
        self._options = OPTIONS if durable else f"{OPTIONS} -c fsync=off"
        found = find_binaries()
        assert found is not None
        self._binaries, self._folder = found, Path(tempfile.mkdtemp(prefix="redraft-postgres-"))
        self._run_as: dict[str, Any] = {}
        if os.getuid() == 0:
            names = {user.pw_name for user in pwd.getpwall()}
            user = pwd.getpwnam("postgres" if "postgres" in names else "nobody")
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            self._run_as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self.address = f"postgresql://redraft@/postgres?host={self._folder}"

    def __enter__(self) -> Self:
        self._call("initdb", "-A", "trust", "-U", "redraft", "-E", "UTF8", "--locale=C", "--no-sync")
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    def start(self) -> None:
        options = f"{self._options} -k {self._folder}"
        self._call("pg_ctl", "-w", "-o", options, "-l", str(self._folder / "server.log"), "start")

    def stop(self) -> None:
        """Stop it at once: whoever is connected is cut off, and nothing is written any more."""
        self._call("pg_ctl", "-w", "-m", "immediate", "stop")

    def _call(self, program: str, *arguments: str) -> None:
        data = ["-D", str(self._folder / "data")]
        subprocess.run(
            [str(self._binaries / program), *data, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=self._folder,
            **self._run_as,
        )
