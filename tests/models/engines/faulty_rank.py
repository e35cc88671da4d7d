"""An extension of vLLM's worker whose rank 1 has faults that a real one may have, chosen by the draft's name."""

from typing import Any

from models.engines.vllm.redraft_vllm.worker import DraftExtension


class Faulty(DraftExtension):
    """Rank 1 can't read drafts called "unreadable…", and keeps computing with the one before after "stale…"."""

    def redraft_stage(self, version: str, path: str, sha256: str, parameters: Any) -> Any:
        """See the base class."""
        if self.rank == 1 and version.startswith("unreadable"):
            path += "-absent"
        return super().redraft_stage(version, path, sha256, parameters)

    def redraft_commit(self, version: str) -> Any:
        """See the base class."""
        answer = super().redraft_commit(version)
        if self.rank == 1 and version.startswith("stale"):
            before: Any = self._redraft_before
            self._redraft_draft.load(before.weights, before.parameters)
        return answer
