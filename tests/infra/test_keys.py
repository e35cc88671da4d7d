"""The keys of a home: kept as hashes, made and revoked by name, and one that the home's own commands ask with."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra import keys
from infra.keys import add_key, bring_keys, is_loopback, operator_key, read_keys, require_client, revoke_key, sha256_of
from tests.infra.rows import run_python


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "home" / keys.FILE


def accepted(file: Path) -> dict[str, str]:
    return {key.name: key.role for key in read_keys(file) if key.accepted}


def test_a_key_is_told_once_and_kept_as_a_hash_that_only_its_owner_can_read(file: Path) -> None:
    made = add_key(file, "team-one", "client", "metadata")
    assert len(made) > 40
    [key] = read_keys(file)
    assert (key.name, key.role, key.log, key.sha256) == ("team-one", "client", "metadata", sha256_of(made))
    assert made != add_key(file, "team-two", "client")
    assert {entry.stat().st_mode & 0o777 for entry in file.parent.iterdir()} == {0o600}
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert made not in file.read_text()
    assert key.sha256 not in repr(key)


def test_a_revoked_key_stays_known_and_its_name_is_free_again(file: Path) -> None:
    first = add_key(file, "team", "client")
    with pytest.raises(ValueError, match='there is a key "team" already'):
        add_key(file, "team", "operator")
    revoke_key(file, "team")
    assert accepted(file) == {}
    with pytest.raises(ValueError, match='no key "team" to revoke; there are: none'):
        revoke_key(file, "team")
    assert add_key(file, "team", "scraper") != first
    assert accepted(file) == {"team": "scraper"}
    assert [key.accepted for key in read_keys(file)] == [False, True]


@pytest.mark.parametrize("name", ["", "Team", "a b", "../x", "a" * 65, "home", "\x1b[31m"])
def test_what_is_no_name_of_a_key_is_refused(file: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a key|already"):
        add_key(file, name, "client")
    assert accepted(file) == {}


def test_keys_of_the_variable_are_clients_and_one_that_was_revoked_stays_so(file: Path) -> None:
    brought = [("the-first-key", None), ("the-second-key", "full")]
    for _ in range(2):
        bring_keys(file, brought)
    assert [(key.role, key.log, key.sha256) for key in read_keys(file)] == [
        ("client", None, sha256_of("the-first-key")),
        ("client", "full", sha256_of("the-second-key")),
    ]
    name = read_keys(file)[0].name
    revoke_key(file, name)
    with pytest.raises(ValueError, match=f'holds key "{name}", which was revoked') as refused:
        bring_keys(file, brought)
    assert "the-first-key" not in str(refused.value)


def test_the_homes_own_operator_key_is_made_once_and_replaced_when_it_was_revoked_or_removed(file: Path) -> None:
    home = file.parent
    first = operator_key(home)
    assert operator_key(home) == first
    assert accepted(file) == {"home": "operator"}
    revoke_key(file, "home")
    second = operator_key(home)
    (home / keys.OWN_FILE).unlink()
    third = operator_key(home)
    assert len({first, second, third}) == 3
    assert [key.sha256 for key in read_keys(file) if key.accepted] == [sha256_of(third)]


def test_only_this_machine_counts_as_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")] == [False] * 5


def test_a_service_that_others_reach_needs_a_clients_key_that_is_accepted(file: Path) -> None:
    add_key(file, "me", "operator")
    require_client(file, "127.0.0.1")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^REDRAFT_HOST 0\.0\.0\.0 is reachable from other machines"):
            require_client(file, "0.0.0.0")
        add_key(file, "team", "client")
        require_client(file, "0.0.0.0")
        revoke_key(file, "team")


@pytest.mark.slow
def test_processes_that_change_the_file_at_the_same_time_lose_nothing(file: Path) -> None:
    script = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path\n"
        "from infra.keys import add_key, operator_key\n"
        "file = Path(sys.argv[1])\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    list(pool.map(lambda n: add_key(file, f'{sys.argv[2]}{n}', 'client'), range(8)))\n"
        "    print(len(set(pool.map(lambda _: operator_key(file.parent), range(8)))))"
    )
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda name: run_python(script, file, name).stdout, "ab")] == ["1\n"] * 2
    assert len(accepted(file)) == 17


@pytest.mark.parametrize("content", ["", "[]", '{"keys": [{"name": "a"}]}', '{"keys": 1, "more": 2}'])
def test_a_file_that_holds_something_else_is_named_without_what_it_holds(file: Path, content: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(ValueError, match=r"keys\.json does not hold keys"):
        read_keys(file)
