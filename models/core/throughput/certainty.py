"""How far the draft's own chances can be trusted, by domain, and where a chain ends that is not worth another pass.

A pass and a row more pay while

    P(chain is right | the draft's chance of it) · a_1 · 1 / goodput ≥ ms of a pass and a row,

a_1 being how often the first token is right, which stands for that of the next one (a little low: what follows right
tokens is right more often). P is counted over verified chains, each token of one, by bins of the draft's chance; what
fell below the limit is verified all the same, so that an end that came too early is seen. Drafts are unsure of what
they are right in on one domain and sure of what they are wrong in on another: at a chance of 0.2 a chain was right in
38% of the places of `chat` and 19% of `code` (SmolLM2-135M after a demo).
"""

from collections.abc import Sequence

from models.core.throughput.isotonic import ascending

NUM_BINS = 20
MEMORY = 2000.0  # chains of a bin after which one counts for 1/e
GUESS_WEIGHT = 10.0  # chains that the draft's own chance counts for
REFRESH = 16  # chains between two times that limits are looked for anew


class Certainty:
    """The counts of one domain; changed in place, since every verified chain is shown to them."""

    def __init__(self) -> None:
        """Know nothing yet: the draft is believed."""
        self._seen = [0.0] * NUM_BINS
        self._right = [0.0] * NUM_BINS
        self._num = 0
        self._known: tuple[float, ...] = ()

    def see(self, chances: Sequence[float], num_accepted: int) -> None:
        """Take in a verified chain: of each of its tokens the draft's chance that all up to it are right."""
        keep = 1 - 1 / MEMORY
        for place, chance in enumerate(chances):
            at = min(int(chance * NUM_BINS), NUM_BINS - 1)
            self._seen[at] = self._seen[at] * keep + 1
            self._right[at] = self._right[at] * keep + (place < num_accepted)
        self._num += 1

    def least(self, worth: float) -> float:
        """Return the draft's chance from which on a chain is right as often as `worth`; 0 if all are, 1 if none is."""
        if self._num % REFRESH == 0 or not self._known:
            weights = [seen + GUESS_WEIGHT for seen in self._seen]
            rates = [
                (right + GUESS_WEIGHT * (at + 0.5) / NUM_BINS) / weight
                for at, (right, weight) in enumerate(zip(self._right, weights, strict=True))
            ]
            self._known = ascending(rates, weights)
        return next((at / NUM_BINS for at, rate in enumerate(self._known) if rate >= worth), 1.0)
