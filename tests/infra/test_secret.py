from pathlib import Path

import pytest

from infra.secret import NAME, home_secret
from tests.infra.rows import run_python


def test_a_home_has_one_secret_that_its_owner_alone_may_read(tmp_path: Path) -> None:
    home, other = tmp_path / "one", tmp_path / "other"
    assert home_secret(home) == home_secret(home) != home_secret(other)
    assert (home / NAME).stat().st_mode & 0o777 == 0o600
    assert [file.name for file in home.iterdir()] == [NAME]
    assert home_secret(home, "another.key") == home_secret(home, "another.key") != home_secret(home)


def test_processes_that_come_at_the_same_time_get_the_same_one(tmp_path: Path) -> None:
    script = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path\n"
        "from infra.secret import home_secret\n"
        "with ThreadPoolExecutor(16) as pool:\n"
        "    print(len(set(pool.map(lambda _: home_secret(Path(sys.argv[1])), range(64)))))"
    )
    assert run_python(script, tmp_path).stdout == "1\n"


def test_a_removed_secret_is_made_anew_and_a_torn_or_open_one_is_refused(tmp_path: Path) -> None:
    first = home_secret(tmp_path)
    file = tmp_path / NAME
    file.unlink()
    assert home_secret(tmp_path) != first
    file.chmod(0o644)
    with pytest.raises(ValueError, match=r"others may read .*split\.key; remove it"):
        home_secret(tmp_path)
    file.write_bytes(first[:7])
    with pytest.raises(ValueError, match=r"split\.key holds 7 bytes, wanted 32; remove it, and a new one is made"):
        home_secret(tmp_path)
