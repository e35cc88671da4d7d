"""Who may ask the service: the keys of a home, kept as hashes in a file that the service reads again when it changed.

A client's key reaches /v1, a scraper's /metrics, an operator's all of it. One that was revoked stays in the file: on
loopback nobody needs a key only until a client's was made, and revoking the last one must not open the endpoint again.
"""

import hashlib
import ipaddress
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field, ValidationError

from infra.consent import Consent
from infra.files import lock_file, write_atomic
from infra.home import home_secret
from infra.settings import Settings
from models.types import Frozen

Role = Literal["client", "operator", "scraper"]
ROLES: tuple[Role, ...] = get_args(Role)
FILE, LOCK, OWN_FILE = "keys.json", ".keys.lock", "operator.key"
# Names of keys that nobody gave a name: the home's own one, and those that a variable brought.
OWN, BROUGHT = "home", "brought-"
NUM_BYTES = 32


class Key(Frozen):
    """What is kept of a key; `log` is what its owner agreed to have logged, None if nothing was agreed."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")
    role: Role
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    log: Consent | None = None
    made_ms: int
    revoked_ms: int | None = None

    @property
    def accepted(self) -> bool:
        return self.revoked_ms is None


class _File(Frozen):
    keys: tuple[Key, ...] = ()


def keys_path(settings: Settings) -> Path:
    return settings.home / FILE


def sha256_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(file: Path) -> tuple[Key, ...]:
    """Return the keys of a file, revoked ones too; none if there is no file; ValueError if it does not hold keys."""
    try:
        return _File.model_validate_json(file.read_bytes()).keys
    except FileNotFoundError:
        return ()
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{file} does not hold keys: {faults}") from None


def add_key(file: Path, name: str, role: Role, log: Consent | None = None) -> str:
    """Make a key, keep its hash, and return it; ValueError if the name is taken or no name."""
    key = f"rd-{secrets.token_urlsafe(NUM_BYTES)}"
    with _changing(file) as keys:
        if any(one.name == name and one.accepted for one in keys) or name == OWN:
            raise ValueError(f'there is a key "{name}" already; choose another name, or revoke it first')
        keys.append(_key(name, role, key, log))
    return key


def revoke_key(file: Path, name: str) -> None:
    """Revoke a key, the home's own one until the next command; ValueError if none of that name is accepted."""
    with _changing(file) as keys:
        found = [number for number, one in enumerate(keys) if one.name == name and one.accepted]
        if not found:
            known = ", ".join(sorted(one.name for one in keys if one.accepted)) or "none"
            raise ValueError(f'there is no key "{name}" to revoke; there are: {known}')
        if name == OWN:
            file.with_name(OWN_FILE).unlink(missing_ok=True)
        _revoke(keys, found[0])


def bring_keys(file: Path, brought: Sequence[tuple[str, Consent | None]]) -> None:
    """Accept keys that were made elsewhere as clients'; twice does no harm; ValueError if one of them was revoked."""
    known = {one.sha256: one for one in read_keys(file)}
    missing = []
    for key, log in brought:
        if (found := known.get(sha256_of(key))) is None:
            missing.append(_key(f"{BROUGHT}{sha256_of(key)[:8]}", "client", key, log))
        elif not found.accepted:
            raise ValueError(f'REDRAFT_API_KEYS holds key "{found.name}", which was revoked; take it out')
    if missing:
        with _changing(file) as keys:
            keys += [one for one in missing if one.sha256 not in {other.sha256 for other in keys}]


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; a name other than localhost does not count."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_client(file: Path, host: str) -> None:
    """Raise ValueError if other machines reach a service and no client has a key for it, or the file holds none."""
    if not any(key.accepted for key in read_keys(file) if key.role == "client") and not is_loopback(host):
        raise ValueError(
            f"REDRAFT_HOST {host} is reachable from other machines, and no client has a key; "
            "make one: redraft keys add NAME"
        )


def operator_key(home: Path) -> str:
    """Return the key with which the home's own commands ask its service, made now if there is none."""
    key, file = f"rd-{home_secret(home, OWN_FILE).hex()}", home / FILE
    if not any(one.sha256 == sha256_of(key) and one.accepted for one in read_keys(file)):
        with _changing(file) as keys:
            for number, one in enumerate(keys):
                if one.name == OWN and one.accepted:
                    _revoke(keys, number)
            keys.append(_key(OWN, "operator", key, None))
    return key


def _key(name: str, role: Role, key: str, log: Consent | None) -> Key:
    try:
        return Key(name=name, role=role, sha256=sha256_of(key), log=log, made_ms=int(time.time() * 1000))
    except ValidationError:
        raise ValueError(f'"{name}" is no name of a key: wanted up to 64 of a-z, 0-9, _, . and -') from None


def _revoke(keys: list[Key], number: int) -> None:
    keys[number] = keys[number].model_copy(update={"revoked_ms": int(time.time() * 1000)})


@contextmanager
def _changing(file: Path) -> Iterator[list[Key]]:
    """Hold the file, hand out its keys, and write them in one rename; whoever reads meanwhile sees old or new."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with lock_file(file.with_name(LOCK)):
        keys = list(read_keys(file))
        yield keys
        write_atomic(file, json.dumps({"keys": [one.model_dump() for one in keys]}, indent=1))
