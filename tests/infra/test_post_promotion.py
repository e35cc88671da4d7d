"""What is kept of tests: whole or as it was before, and one process at a time."""

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.post_promotion import FAILED, WORK, Compared, PostPromotionTest, PostPromotionTests
from infra.settings import Settings
from tests.infra.rows import run_python

COMPARED = Compared(seq=7, domain="chat", tau=1.5, previous_tau=1.6)
TEST = PostPromotionTest(draft=3, previous=2, num_wanted=500, compared=(COMPARED,))


@pytest.fixture
def tests(tmp_path: Path) -> PostPromotionTests:
    return PostPromotionTests(Settings(home=tmp_path / "home"))


def test_one_is_found_again_by_its_two_drafts(tests: PostPromotionTests) -> None:
    assert (tests.find(3, 2), tests.of_draft(3), tests.unfinished()) == (None, None, [])
    tests.save(TEST)
    assert (tests.find(3, 2), tests.find(2, 3), tests.find(33, 2)) == (TEST, None, None)


def test_the_one_saved_last_is_a_drafts_newest(tests: PostPromotionTests) -> None:
    for age, previous in enumerate((2, 1)):
        tests.save(TEST.model_copy(update={"previous": previous}))
        os.utime(tests.folder / f"3-{previous}.json", (age, age))
    assert (found := tests.of_draft(3)) is not None
    assert found.previous == 1


def test_one_that_was_to_act_is_unfinished(tests: PostPromotionTests) -> None:
    tests.save(TEST)
    lost = TEST.model_copy(update={"previous": 1, "outcome": FAILED})
    tests.save(lost)
    assert tests.unfinished() == [lost]


def test_only_its_owner_can_read_the_folder_and_nothing_half_written_is_left(tests: PostPromotionTests) -> None:
    for _ in range(2):
        tests.save(TEST)
    assert tests.folder.stat().st_mode & 0o777 == 0o700
    assert [file.name for file in tests.folder.iterdir()] == ["3-2.json"]


def test_what_a_look_needs_is_gone_with_it_also_when_it_was_killed(tests: PostPromotionTests) -> None:
    with pytest.raises(KeyError), tests.workspace() as work:
        assert {folder.stat().st_mode & 0o777 for folder in (tests.folder, work)} == {0o700}
        (work / "states.bin").write_text("text")
        raise KeyError
    assert not (tests.folder / WORK).exists()
    (tests.folder / WORK).mkdir()
    tests.sweep()
    assert not (tests.folder / WORK).exists()


def test_the_drafts_of_a_home_are_tested_by_one_process(tests: PostPromotionTests) -> None:
    code = (
        "import sys; from pathlib import Path; from infra.settings import Settings\n"
        "from infra.post_promotion import PostPromotionTests\n"
        "with PostPromotionTests(Settings(home=Path(sys.argv[1]))).alone(): print('alone')"
    )
    with tests.alone():
        assert "another process tests the promoted drafts of" in run_python(code, tests.folder.parent).stderr
    assert run_python(code, tests.folder.parent).stdout == "alone\n"


@pytest.mark.slow
def test_one_that_ends_in_time_is_waited_for(tests: PostPromotionTests) -> None:
    with ExitStack() as holding:
        holding.enter_context(tests.alone())
        with pytest.raises(ValueError, match="another process tests"), tests.alone():
            pass
        ends = threading.Timer(0.3, holding.close)
        ends.start()
        with tests.alone(wait_s=60):
            pass
        ends.join()
