"""`python -m services.main --config FILE.json`: one service on this machine, until SIGTERM or SIGINT.

This process only watches another one (services/runner.py), which runs in a session of its own with Ray's processes in
its group. So a signal to this process's group does not hit Ray before the requests were drained, and whatever is left
at the end dies with that group. Exit code 2 means that the configuration is wrong, 1 that the service failed; the log
says why.
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from infra.home import close_to_others, home_secret, open_home, require_cluster, serving
from infra.keys import bring_keys, require_client
from infra.processes import hold_port
from infra.settings import load_settings
from services.config import ServiceConfig, read_as

# Beyond the time that requests get: replica, engine and Ray end in about ten seconds.
SHUTDOWN_GRACE_S = 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m services.main", description="Serve a target and its draft.")
    parser.add_argument("--config", type=Path, required=True, help="JSON file, see services/config.py")
    arguments = parser.parse_args(argv)
    with ExitStack() as held:
        try:
            settings = load_settings()
            open_home(settings)
            close_to_others(settings.home)
            config = read_as(ServiceConfig, arguments.config)
            config.engine_params()
            bring_keys(config.keys, [(key, None) for key in settings.api_keys])
            require_client(config.keys, config.settings.host)
            require_cluster(config.settings)
            home_secret(settings.home)  # the replica's, which could tell nobody that it is wrong
            if not config.settings.ray_address:  # Ray takes many ports before the proxy starts.
                held.enter_context(hold_port(config.settings.host, config.serve.port))
            held.enter_context(serving(settings.home, config.url))
        except ValueError as error:
            print(f"services.main: {error}", file=sys.stderr)
            return 2
        settings.prepare_environment()
        # Once for the replicas that there are, and once more for one that came while they drained.
        grace_s = config.serve.drain_s * (2 if config.serve.autoscaling.max_replicas > 1 else 1) + SHUTDOWN_GRACE_S
        return _watch([sys.executable, "-m", "services.runner", str(arguments.config)], grace_s)


def _watch(argv: list[str], grace_s: float) -> int:
    """Run `argv` in a session of its own, pass signals on to it alone, and leave nothing of its group behind."""
    search_path = os.pathsep.join(path for path in sys.path if path)
    program = subprocess.Popen(argv, start_new_session=True, env={**os.environ, "PYTHONPATH": search_path})
    signalled = False

    def pass_on(number: int, _: object) -> None:
        nonlocal signalled
        if not signalled:  # once: a group and its leader may both be signalled
            signalled = True
            signal.signal(signal.SIGALRM, lambda *_: os.killpg(program.pid, signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, grace_s)
            program.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    # Not reaped before its group is gone, so that the group's id can't be another's.
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    code = program.wait()
    return code if code >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
