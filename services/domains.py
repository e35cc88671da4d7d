"""Which domains a key may name: so many, and what it names beyond them is `other`'s.

Names come from clients, and each is a series of the metrics, a share of every refresh and a probe set of its own. One
bound for all would let one key's made-up names hide the domains of others. It holds for as long as the service runs.
"""

from collections import defaultdict

from infra.consent import DEFAULT_DOMAIN, OTHER_DOMAINS, Domain

MAX_PER_KEY = 16


class Domains:
    """The names that each key has used since the start."""

    def __init__(self, max_per_key: int = MAX_PER_KEY) -> None:
        self._max_per_key = max_per_key
        self._named: defaultdict[str | None, set[Domain]] = defaultdict(set)

    def admit(self, key: str | None, domain: Domain) -> Domain:
        """Return the domain that a request counts for.

        Args:
            key: hash of the key that it came with; requests without one are one key's.
            domain: what it names.
        """
        named = self._named[key]
        if domain not in (DEFAULT_DOMAIN, OTHER_DOMAINS) and domain not in named:
            if len(named) >= self._max_per_key:
                return OTHER_DOMAINS
            named.add(domain)
        return domain
