"""How a draft reaches several servers: the first that answers tries it, the rest get it once it was proven there.

Who may take a draft follows from rows in a file of the home, so that a proven draft goes on to the rest after a restart
too. What a server's reconciler asks for the champion is told of none before its turn, and the last good draft stays.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from infra.registry import Registry
from infra.rollouts import AttachedServer, RolloutState, read_rollout, write_rollout
from infra.versions import Version
from models.targets import TargetCard
from services.drafts import DraftSource, DraftState, label

KEPT_PROVEN = 16

log = logging.getLogger(__name__)


class Rollout(RolloutState):
    """What follows from where all servers stand, and from what is seen of them."""

    @property
    def is_followed(self) -> bool:
        """Whether any server was ever followed."""
        return any(row.version for row in self.rows)

    def may_take(self, server: str, version: str) -> bool:
        """Whether a server may take a draft, by its label, now."""
        return version in self.proven or any(row.server == server and row.wave == 0 for row in self.rows)

    def listed(self, servers: Sequence[str]) -> "Rollout":
        """Return the state when these are the servers: others leave, and new ones come last, in their order."""
        known = {row.server for row in self.rows}
        kept = (row for row in self.rows if row.server in servers)
        new = (AttachedServer(wave=1, server=server) for server in servers if server not in known)
        return _in_waves((*kept, *new), self.proven)

    def saw(self, server: str, state: DraftState | None) -> "Rollout":
        """Return the state after a look at a server's reconciler; None of a server that does not answer."""
        rows, proven = {row.server: row for row in self.rows}, self.proven
        if state is None:
            rows[server] = rows[server].model_copy(update={"state": "away"})
        else:
            serving = "" if state.serving is None else label(state.serving.version)
            rows[server] = rows[server].model_copy(update={"state": "serving", "version": serving})
            if serving and state.proof is not None:
                proven = (serving, *(other for other in proven if other != serving))[:KEPT_PROVEN]
        return _in_waves(rows.values(), proven)


def _in_waves(rows: Iterable[AttachedServer], proven: tuple[str, ...]) -> Rollout:
    """Return the state in which the first that is not known to be away tries new drafts."""
    rows = tuple(rows)
    first = next((row.server for row in rows if row.state != "away"), "")
    waves = (row.model_copy(update={"wave": int(row.server != first)}) for row in rows)
    return Rollout(rows=tuple(waves), proven=proven)


class RolloutFile:
    """The rollout of the servers that a process follows, on the disk after each change.

    Attributes:
        rollout: where they stand.
    """

    def __init__(self, path: Path) -> None:
        """Go on with what an earlier process left; a file that can't be read is as none."""
        self._path, left = path, read_rollout(path)
        self.rollout = Rollout(rows=(), proven=() if left is None else left.rollout.proven)

    def become(self, rollout: Rollout) -> None:
        """Keep the state after an event; a full disk costs the memory of a restart."""
        before, self.rollout = self.rollout, rollout
        if self.rollout == before:
            return
        for row in set(self.rollout.rows) - set(before.rows):
            log.info("%s, wave %d: %s, draft %s", row.server, row.wave, row.state, row.version or "unknown")
        try:
            write_rollout(self._path, self.rollout)
        except OSError as error:
            log.warning("where the servers stand was not written: %s", error)


class RolloutSource(DraftSource):
    """Names the champion to a server whose turn it is, and none to another."""

    def __init__(
        self,
        registry: Registry,
        cache: Path,
        target: TargetCard,
        num_draft_tokens: int,
        may_take: Callable[[str], bool],
    ) -> None:
        """Say as in `DraftSource` where drafts come from; `may_take` is asked with a draft's label."""
        super().__init__(registry, cache, target, num_draft_tokens)
        self._may_take = may_take

    def champion(self) -> Version | None:
        """See `DraftSource.champion`."""
        champion = super().champion()
        return champion if champion is not None and self._may_take(label(champion)) else None
