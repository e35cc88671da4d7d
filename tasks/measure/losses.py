"""What a model says of held-out text, as means that keep what each document gave."""

from collections.abc import Sequence

from models.evaluation import perplexity as text
from models.evaluation.perplexity import Likelihood
from tasks.measure.spread import Mean


def nats_per_token(scores: Sequence[Likelihood]) -> Mean:
    """Return the mean over all tokens, so that a long document counts for more."""
    return Mean([one.nats / one.num_tokens for one in scores], [float(one.num_tokens) for one in scores])


def perplexity(scores: Sequence[Likelihood]) -> Mean:
    """Return e to the mean nats a token; a document gives what it adds to that, to first order."""
    nats, whole = nats_per_token(scores), text.perplexity(scores)
    return Mean([whole * (1 + one - nats) for one in nats.documents])
