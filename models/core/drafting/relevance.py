"""Which parts of a text have to do with a question: BM25 over tokens, no model and nothing learnt.

    score(part) = Σ over the question's different tokens t:  idf(t) · f (k₁ + 1) / (f + k₁ (1 − b + b · length / mean))

f is how often t stands in the part, idf(t) = log(1 + (N − n + ½) / (n + ½)) with n of the N parts holding t, which is
never below 0: a token that every part holds says next to nothing.
"""

import math
from collections import Counter
from collections.abc import Sequence

PAPER = "Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond, 2009"
SATURATION, BY_LENGTH = 1.2, 0.75  # k₁ and b


def score(parts: Sequence[Sequence[int]], question: Sequence[int]) -> list[float]:
    """Score parts of a text by a question, token ids; 0 for a part that has no token of it."""
    counts = [Counter(part) for part in parts]
    mean = sum(map(len, parts)) / max(len(parts), 1)
    scores = [0.0] * len(parts)
    for token in sorted(set(question)):
        holding = sum(token in count for count in counts)
        weight = math.log(1 + (len(parts) - holding + 0.5) / (holding + 0.5))
        for number, count in enumerate(counts):
            if often := count[token]:
                length = 1 - BY_LENGTH + BY_LENGTH * len(parts[number]) / mean
                scores[number] += weight * often * (SATURATION + 1) / (often + SATURATION * length)
    return scores
