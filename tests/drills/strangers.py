"""A service that strangers ask, and requests of theirs."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from tests.drills.load import Client, Load, quiet_answers
from tests.world import MODEL, PROMPTS, World

Form = dict[str, Any]


class Strangers:
    """A service, and what its processes hold."""

    def __init__(self, world: World) -> None:
        self.world, self.service = world, world.start()

    def memory_bytes(self) -> int:
        """Return the resident memory of the service's processes, shared pages counted once for each."""
        return sum(process.memory_info().rss for process in self._family())

    def listening(self) -> list[str]:
        """Return the addresses that the service's processes listen on, one for each port."""
        family = {process.pid for process in self._family()}
        found = psutil.net_connections(kind="inet")
        ours = {c.laddr for c in found if c.status == psutil.CONN_LISTEN and c.pid in family}
        return [address.ip for address in ours]

    def load(self) -> Load:
        return Load(self.world.url, quiet_answers(self.world), [Client()] * 2)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """End the service, and start it again at the end."""
        self.stop()
        yield
        self.service = self.world.start()

    def bring_back_the_first_log(self) -> None:
        """Let the log's folder be as it was when this was called first; the service is stopped."""
        folder, kept = self.world.querylog.parent, self.world.home / "kept"
        if kept.exists():
            shutil.rmtree(folder)
        shutil.copytree(*((kept, folder) if kept.exists() else (folder, kept)))

    def stop(self) -> None:
        self.service.stop(grace_s=60)

    def _family(self) -> list[psutil.Process]:
        service = psutil.Process(self.service.pid)
        return [service, *service.children(recursive=True)]


def caller(world: World, key: str) -> httpx.Client:
    """Return a client that is made before its requests are timed."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"{world.url}/v1/", headers=headers, timeout=60, trust_env=False)


def answer_in(client: httpx.Client, form: Form) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 8, "temperature": 0}
    return client.post("chat/completions", json=body | form)


def require_error(answer: httpx.Response, status: int) -> None:
    """Check that an answer is an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
