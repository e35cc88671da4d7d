"""What is kept of watches: whole or as it was before, and one process at a time."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.settings import Settings
from infra.watches import LOST, WORK, Compared, Watch, Watches
from tests.infra.rows import ROOT

COMPARED = Compared(seq=7, domain="chat", tau=1.5, previous_tau=1.6)
WATCH = Watch(draft=3, previous=2, num_wanted=500, compared=(COMPARED,))


@pytest.fixture
def watches(tmp_path: Path) -> Watches:
    return Watches(Settings(home=tmp_path / "home"))


def test_a_watch_is_found_again_by_its_two_drafts(watches: Watches) -> None:
    assert (watches.find(3, 2), watches.of_draft(3), watches.unfinished()) == (None, None, [])
    watches.save(WATCH)
    assert (watches.find(3, 2), watches.find(2, 3), watches.find(33, 2)) == (WATCH, None, None)


def test_the_one_saved_last_is_a_drafts_watch(watches: Watches) -> None:
    for age, previous in enumerate((2, 1)):
        watches.save(WATCH.model_copy(update={"previous": previous}))
        os.utime(watches.folder / f"3-{previous}.json", (age, age))
    found = watches.of_draft(3)
    assert found is not None
    assert found.previous == 1


def test_a_watch_that_was_to_act_is_unfinished(watches: Watches) -> None:
    watches.save(WATCH)
    lost = WATCH.model_copy(update={"previous": 1, "outcome": LOST})
    watches.save(lost)
    assert watches.unfinished() == [lost]


def test_only_its_owner_can_read_the_folder_and_nothing_half_written_is_left(watches: Watches) -> None:
    watches.save(WATCH)
    watches.save(WATCH)
    assert watches.folder.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in watches.folder.iterdir()] == ["3-2.json"]


def test_what_a_look_needs_is_gone_with_it_also_when_it_was_killed(watches: Watches) -> None:
    with pytest.raises(KeyError), watches.workspace() as work:
        assert {folder.stat().st_mode & 0o777 for folder in (watches.folder, work)} == {0o700}
        (work / "states.bin").write_text("text")
        raise KeyError
    assert not (watches.folder / WORK).exists()
    (watches.folder / WORK).mkdir()
    watches.sweep()
    assert not (watches.folder / WORK).exists()


def test_a_home_is_watched_by_one_process(watches: Watches) -> None:
    code = (
        "import sys; from pathlib import Path; from infra.settings import Settings; from infra.watches import Watches\n"
        "with Watches(Settings(home=Path(sys.argv[1]))).alone(): print('alone')"
    )
    argv = [sys.executable, "-c", code, str(watches.folder.parent)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with watches.alone():
        other = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
        assert "another process watches the drafts of" in other.stderr
    other = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert other.stdout == "alone\n"


@pytest.mark.slow
def test_a_watch_that_ends_in_time_is_waited_for(watches: Watches) -> None:
    released = threading.Event()

    def hold() -> None:
        with watches.alone():
            held.set()
            released.wait(0.5)

    held = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    with pytest.raises(ValueError, match="another process watches"), watches.alone():
        pass
    with watches.alone(wait_s=60):
        pass
    holder.join()
