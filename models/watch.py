"""When served acceptance has fallen so far that a refresh should start.

A domain is held against what its draft was promoted for: its own τ at the gate or, for a domain that the draft has
never seen, the best of the others. It tells once, and again only after it recovered, after another draft came, or not
at all within the cool-down: acceptance of a few hundred requests goes up and down by itself, and each telling costs a
training run.
"""

from collections.abc import Mapping

from models.params import Frozen


class Params(Frozen):
    """Thresholds.

    Attributes:
        fall: share of the promised gain over 1.0 whose loss counts as a fall.
        recover: share whose loss still counts as recovered; below `fall`, so that a figure on the edge tells once.
        min_requests: a domain's last requests that are needed to say anything.
        cooldown_s: seconds in which a domain tells at most once.
        period_s: seconds between looks.
    """

    fall: float = 0.3
    recover: float = 0.15
    min_requests: int = 64
    cooldown_s: float = 900.0
    period_s: float = 5.0


class AcceptanceWatch:
    """Follows each domain's served τ; asked by the service now and then."""

    def __init__(self, params: Params) -> None:
        self._params = params
        self._fallen: dict[str, str] = {}  # domain → the draft that it fell with
        self._told_s: dict[str, float] = {}

    def see(
        self,
        draft: str,
        promised: Mapping[str, float],
        served: Mapping[str, Mapping[str, float | int | None]],
        now_s: float,
    ) -> dict[str, dict[str, float]]:
        """Return the domains that have just fallen, with the promised and the served τ.

        Args:
            draft: the version that serves.
            promised: domain to τ at the gate.
            served: domain to "requests" and "mean_accepted_length", see `Recorder.acceptance`.
            now_s: monotonic.
        """
        told = {}
        for domain, figures in served.items():
            tau, wanted = figures["mean_accepted_length"], promised.get(domain, max(promised.values(), default=1.0))
            if tau is None or (figures["requests"] or 0) < self._params.min_requests or wanted <= 1:
                continue
            lost = 1 - (tau - 1) / (wanted - 1)
            if self._fallen.get(domain) == draft:
                if lost <= self._params.recover:
                    del self._fallen[domain]
            elif lost > self._params.fall:
                last_s = self._told_s.get(domain)
                if last_s is None or now_s - last_s >= self._params.cooldown_s:
                    self._fallen[domain], self._told_s[domain] = draft, now_s
                    told[domain] = {"promised": wanted, "served": tau}
        return told
