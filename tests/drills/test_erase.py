"""F37: an erasure killed anywhere is completed by the next run, and the person's text is nowhere in the home."""

import json
import shutil
from pathlib import Path

import pytest

from infra.settings import Settings
from tests.infra.erase.planted import make_home
from tests.infra.rows import run_python

# Forks, so that what takes seconds to import is imported once: a first child erases and is killed at its n-th change of
# a file or after its n-th write to the journal; a second one erases and checks.
KILLS = """
import json, os, shutil, signal, sys, traceback
from itertools import count
from pathlib import Path
from infra.environment import environment_of
from infra.erase import erase_subject
from infra.erasures import Erasures
from infra.registry import open_registry
from infra.settings import load_settings
from tests.infra.erase.planted import WHO, check_erased
import mlflow, mlflow.store.tracking.sqlalchemy_store

home, whole = Path(sys.argv[1]), Path(sys.argv[2])
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree", "os.chmod", "os.link"}

def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitpid(pid, 0)[1]

def killed(when, nth):
    def work():
        seen = count(1)
        def hit():
            if next(seen) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
        if when == "change":
            sys.addaudithook(lambda event, args: hit() if event in CHANGES and str(home) in str(args[0]) else None)
        else:
            enter = Erasures.enter
            def noisy(*args):
                enter(*args)
                hit()
            Erasures.enter = noisy
        erase_subject(load_settings(environment_of(home)), WHO)
    return work

def again():
    settings = load_settings(environment_of(home))
    erase_subject(settings, WHO)
    check_erased(settings)

points = {}
for when in ("change", "after"):
    for nth in count(1):
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(whole, home)
        status = child(killed(when, nth))
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (when, nth, status)
        assert child(again) == 0, (when, nth)
        points[when] = nth
print(json.dumps(points))
"""


@pytest.fixture
def settings(tmp_path: Path, store: Path) -> Settings:
    """Return a home with a person's text in it, and beside it a copy of the whole."""
    settings = make_home(tmp_path / "home", store)
    shutil.copytree(settings.home, tmp_path / "whole")
    return settings


def test_f37_an_erasure_killed_at_any_change_of_a_file_or_its_journal_is_completed_by_the_next(
    settings: Settings,
) -> None:
    done = run_python(KILLS, settings.home, settings.home.with_name("whole"))
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads(done.stdout.splitlines()[-1])
    print(f"\nkilled and completed: {points}")
    assert points["change"] >= 20 and points["after"] >= 10
