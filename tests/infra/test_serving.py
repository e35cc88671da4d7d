"""A home is served once, and the folders of a service's parts are for nobody else."""

import os
import tempfile
from pathlib import Path

import pytest

from infra.serving import front_folder, is_served, ray_folder, served_by
from infra.settings import is_plain
from tests.conftest import ODD_NAME
from tests.infra.rows import running_python


@pytest.mark.slow
def test_f39_a_service_that_was_killed_holds_its_home_no_more(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from infra.serving import serving\n"
    code += "with serving(Path(sys.argv[1]), 'http://gone'): print('serving', flush=True); time.sleep(60)"
    with running_python(code, tmp_path) as (_, told):
        assert told == "serving"
        assert is_served(tmp_path)
        assert "at http://gone" in served_by(tmp_path)
    assert not is_served(tmp_path)


def test_the_fronts_folder_is_for_nobody_else_and_its_sockets_path_is_never_too_long(tmp_path: Path) -> None:
    folders = [front_folder(tmp_path / (letter * 100)) for letter in "ab"] + [front_folder(Path("/", ODD_NAME))]
    with tempfile.TemporaryDirectory() as home:
        assert front_folder(Path(home)) == Path(home, "front")
    assert folders[0] != folders[1]
    assert ray_folder(Path("/", ODD_NAME)) == ray_folder(tmp_path / ("a" * 100))
    for folder in folders:
        assert is_plain(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(folder / "replica.sock.1234567")) < 108
        folder.rmdir()
