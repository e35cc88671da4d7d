"""Made-up scores of conversations, and of the same ones with another draft."""

from collections.abc import Iterable

import numpy as np

from models.core.evaluation.paired import Score


def conversations(count: int, name: str = "", domain: str = "chat", accepted: float = 0.7) -> list[Score]:
    """Return conversations of 20 steps, of which so many tokens a step were accepted."""
    return [Score(id=f"{name}{number}", domain=domain, steps=20, accepted=20 * accepted) for number in range(count)]


def changed(scores: list[Score], changes: Iterable[float] | float) -> list[Score]:
    """Return the same conversations with so many more tokens accepted a step, in all or in each."""
    each = np.broadcast_to(np.asarray(changes), len(scores)).tolist()
    return [
        one.model_copy(update={"accepted": max(0.0, one.accepted + one.steps * change)})
        for one, change in zip(scores, each, strict=True)
    ]
