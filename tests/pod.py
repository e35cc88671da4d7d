"""What a pod is to a program, without a cluster: another user, a read-only root, and a few mounts that it may write to.

A mount namespace holds the system, Python and this checkout, all read-only, and a root that is its own.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.imports import ROOT

# As of a cluster that gives each namespace users of its own: no account of the image has this number.
USER, GROUP = 12345, 12345
SHARED_MEMORY = "64m"  # what a container gets where nobody asks for more
HOME = Path("/var/lib/redraft")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/sys")
# What Kubernetes tells every container of a Service called redraft, beside what its own `env` says.
OF_SERVICE = {
    "REDRAFT_SERVICE_HOST": "10.96.0.17",
    "REDRAFT_SERVICE_PORT": "8000",
    "REDRAFT_SERVICE_PORT_HTTP": "8000",
    "REDRAFT_PORT": "tcp://10.96.0.17:8000",
    "REDRAFT_PORT_8000_TCP": "tcp://10.96.0.17:8000",
    "REDRAFT_PORT_8000_TCP_PROTO": "tcp",
    "REDRAFT_PORT_8000_TCP_PORT": "8000",
    "REDRAFT_PORT_8000_TCP_ADDR": "10.96.0.17",
}
MAKE = """
set -e
umask 022
root=$1; shift
mount -t tmpfs -o mode=755 pod "$root"
mkdir -p "$root/tmp" "$root/var/lib/redraft"
mount -t tmpfs -o mode=1777 temporary "$root/tmp"
while [ "$1" != -- ]; do
    if [ -e "$1" ]; then mkdir -p "$root$1"; mount --rbind "$1" "$root$1"; mount -o remount,bind,ro "$root$1"; fi
    shift
done
mount -t tmpfs -o size="$SHARED_MEMORY" shm "$root/dev/shm"
mount --bind "$VOLUME" "$root/var/lib/redraft"
mount -o remount,ro "$root"
shift
exec chroot --userspec="$USER_OF_POD:0" --groups="$GROUP_OF_VOLUME" "$root" "$@"
"""


def volume(folder: Path) -> Path:
    """Make a folder as a volume is found under `fsGroup`: root's, and open to a group of the pod's user."""
    folder.mkdir(parents=True)
    os.chown(folder, 0, GROUP)
    folder.chmod(0o2775)
    return folder


def argv_in_pod(command: Sequence[str], volume: Path, root: Path, **environment: str) -> list[str]:
    """Return how a command runs in a pod whose home is a volume, built in an empty folder that nobody else sees.

    The test is skipped where no mount namespace can be made.
    """
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        pytest.skip("only root can make a mount namespace with other users in it, and not in every container")
    told = OF_SERVICE | {"REDRAFT_HOME": str(HOME), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)} | environment
    told |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    shown = sorted({*SYSTEM, sys.base_prefix, sys.prefix, str(ROOT)})
    outside = {"SHARED_MEMORY": SHARED_MEMORY, "VOLUME": volume, "USER_OF_POD": USER, "GROUP_OF_VOLUME": GROUP}
    return [
        *("env", *(f"{name}={value}" for name, value in outside.items())),
        *("unshare", "--mount", "sh", "-c", MAKE, "sh", str(root), *shown, "--"),
        *("env", "-i", "-C", "/", *(f"{name}={value}" for name, value in told.items())),
        *command,
    ]
