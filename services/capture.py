"""Which requests' hidden states are captured, and which of them are written beside the query log.

Two looks, since a row is only known at its end. Before a request runs, its consent and a draw say whether the engine
holds its states at all. Once it is a row, they are written if it may be trained on as it was served: logged with its
text, which scrubbing left as it was. All others are dropped. The files are bounded in bytes and by age.
"""

import asyncio
import logging
import random
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from infra.querylog import CapturedFiles
from models.engines.vllm.capture import Claim
from models.serving import Capture as Params
from services.questions import Origin

if TYPE_CHECKING:
    from models.engines import Completion
    from models.engines.vllm.engine import VllmEngine

MIB = 1 << 20
SWEEP_S = 10.0
VALUE_BYTES = 2
MAX_NAMED = 4096

log = logging.getLogger(__name__)


class Capture:
    """Made by `start`; `run` keeps the folder within its bounds."""

    def __init__(self, engine: "VllmEngine", files: CapturedFiles, params: Params, target: str, width: int) -> None:
        self._engine, self._files, self._params, self._target = engine, files, params, target
        self._loop, self._random = asyncio.get_running_loop(), random.SystemRandom()
        self._row_bytes, self._num_bytes = VALUE_BYTES * width, files.num_bytes()
        self._by_engine, self._own = dict[str, int](), Counter[str]()
        self._named = OrderedDict[str, None]()

    @classmethod
    async def start(cls, engine: "VllmEngine", files: CapturedFiles, params: Params, target: str) -> "Capture | None":
        """Let an engine hold hidden states of a target, by its sha256; None if that is not wanted or can't be."""
        if not params.is_on or engine.draft is None:
            return None
        try:
            width = await engine.capture_states(int(params.max_memory_mib * MIB))
        except ValueError as error:
            log.warning("no hidden states are captured: %s", error)
            return None
        files.make()
        return cls(engine, files, params, target, width)

    @property
    def counts(self) -> dict[str, int]:
        """Requests by what became of their states."""
        return dict(Counter(self._by_engine) + self._own)

    def name_for(self, generation_id: str, origin: Origin) -> str:
        """Return under which name the engine is to hold a generation's states; "" if it is not to."""
        if origin.consent != "full" or self._random.random() >= self._params.share:
            return ""
        if self._num_bytes >= self._params.max_disk_mib * MIB:
            self._own["no space"] += 1
            return ""
        self._named[generation_id] = None
        if len(self._named) > MAX_NAMED:  # whoever left before a first token is never heard of again
            self._named.popitem(last=False)
        return generation_id

    def settle(self, completion: "Completion", row_id: str | None) -> None:
        """Have a generation's states written for a row that may be trained on, or dropped; any thread may call it."""
        asyncio.run_coroutine_threadsafe(self._settle(completion, row_id), self._loop)

    async def run(self) -> None:
        """Remove files by age, and count what is left, now and then: refreshes remove what they have trained on."""
        while True:
            try:
                await asyncio.to_thread(self._sweep)
            except OSError as error:
                log.warning("old hidden states can't be removed: %s", error)
            await asyncio.sleep(SWEEP_S)

    def _sweep(self) -> None:
        self._files.forget_older_than(self._params.keep_days)
        self._num_bytes = self._files.num_bytes()

    async def _settle(self, completion: "Completion", row_id: str | None) -> None:
        name = completion.request_id
        if name not in self._named:
            return
        del self._named[name]
        claim = Claim(name)
        if row_id is not None:
            num_tokens = len(completion.prompt_ids) + len(completion.token_ids)
            claim = Claim(name, str(self._files.path_of(row_id)), num_tokens, self._target)
            self._num_bytes += num_tokens * self._row_bytes
        self._by_engine = await self._engine.settle_states([claim])
