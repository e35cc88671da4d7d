"""Which blocks of the prefix cache the loaded draft can go on from.

A block holds the target's keys and the draft's side by side, and vLLM finds it again by its tokens alone. After a swap
the draft's half is another draft's; where a step ran without a draft it is empty. Neither changes an output, both lower
acceptance for as long as the block is hit, and a hot system prompt may be hit forever. So such a block is forgotten: it
is computed anew by the next request that wants it. Requests that already use it keep it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Written(NamedTuple):
    """What a step writes of one request: positions from `start` up to `end`."""

    request_id: str
    start: int
    end: int


class DraftKeys:
    """Follows which blocks were written with the draft beside the target, step by step.

    Blocks without the draft's keys stay in the cache while the draft rests, because the target's half is as good as
    any, and are forgotten when drafting goes on, or when a request comes that is drafted all the same.
    """

    def __init__(self, kv_cache_manager: Any) -> None:
        """Follow the blocks of vLLM's KVCacheManager."""
        self._managers = kv_cache_manager.coordinator.single_type_managers
        self._pools = list({id(manager.block_pool): manager.block_pool for manager in self._managers}.values())
        self._begun: list[tuple[str, Any]] = []  # with the request that writes it
        self._continued: list[tuple[str, Any]] = []
        self._lacking: dict[int, Any] = {}  # by identity; until written anew from the first position on

    def note(self, step: Iterable[Written]) -> None:
        """Remember which blocks the step that was just scheduled writes; a request that ends in it gives them back."""
        for request_id, start, end in step:
            for manager in self._managers:
                size = manager.block_size
                blocks = manager.req_to_blocks[request_id][start // size : -(-end // size)]
                for number, block in enumerate(blocks, start // size):
                    if not block.is_null:
                        (self._begun if number * size >= start else self._continued).append((request_id, block))

    def settle(self, drafted: Callable[[str], bool], goes_on: bool = True) -> None:
        """Say for which requests the draft ran in that step, and so wrote its keys for all that the step computed.

        Args:
            drafted: whether it did for a request, by its name.
            goes_on: requests that come next are drafted too, so that they need whole keys.
        """
        written = [(*one, True) for one in self._begun] + [(*one, False) for one in self._continued]
        for request_id, block, begun in written:
            if not drafted(request_id):
                self._lacking[id(block)] = block
            elif begun:
                self._lacking.pop(id(block), None)
        if goes_on and any(drafted(request_id) for request_id, _, _ in written):
            self.forget_lacking()
        self._begun, self._continued = [], []

    def forget(self) -> None:
        """Forget every cached block, and what is not full yet once it is."""
        for pool in self._pools:
            pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
            self._lacking |= {id(block): block for block in pool.blocks if block.ref_cnt > 0 and not block.is_null}

    def forget_lacking(self) -> None:
        """Forget every cached block that lacks the draft's keys."""
        for key, block in list(self._lacking.items()):
            if block.block_hash is not None:
                block.pool.evict_blocks({block.block_id})
            if block.ref_cnt == 0:  # whoever gets it next writes it from its first position
                del self._lacking[key]
