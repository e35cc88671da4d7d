import math

import numpy as np
import pytest
from scipy.stats import t as student

from models.core.evaluation.perplexity import Likelihood
from models.core.evaluation.perplexity import perplexity as whole_perplexity
from models.core.evaluation.spread import Mean, differences, nats_per_token, perplexity, spread

CONFIDENCE = 0.95


def test_a_mean_over_documents_is_a_number_that_knows_what_each_gave() -> None:
    found = Mean([1.0, 4.0], [3.0, 1.0])
    assert found == 1.75 and found + 1 == 2.75
    # Around the mean, each by its weight over the mean weight of 2.
    assert found.documents == pytest.approx((1.75 - 0.75 * 1.5, 1.75 + 2.25 * 0.5))
    assert np.mean(found.documents) == pytest.approx(1.75)
    assert Mean([2.0, 4.0]).documents == (2.0, 4.0)
    with pytest.raises(ValueError, match="at least one"):
        Mean([])
    with pytest.raises(ValueError, match="zip"):
        Mean([1.0, 2.0], [1.0])


def test_documents_are_paired_so_that_what_is_hard_for_all_cancels() -> None:
    hard = [1.0, 5.0, 9.0]
    [gain] = differences([Mean([x + 0.5 for x in hard])], [Mean(hard)])
    found = spread([gain])
    assert found.mean == pytest.approx(0.5) and found.reach(CONFIDENCE) == pytest.approx(0)
    assert spread([Mean(hard)]).reach(CONFIDENCE) == pytest.approx(student.ppf(0.975, 2) * 4 / math.sqrt(3))
    assert differences([2.0], [Mean(hard)]) == [-3.0]  # a figure without documents is paired by seed
    with pytest.raises(ValueError, match="zip"):
        differences([Mean([1.0, 2.0])], [Mean(hard)])


def test_seeds_are_the_unit_where_they_differ_by_more_than_documents_make_them() -> None:
    alike, apart = [Mean([1.0, 3.0]), Mean([2.0, 2.0])], [Mean([1.0, 1.1]), Mean([5.0, 5.1])]
    # Documents vary by 2 and by 0, so by 1 in all; a seed's mean of two of them by a half.
    assert spread(alike) == (2.0, 0.5, 2, 1.0)
    assert spread(apart)[1:] == (pytest.approx(8.0), 2, 0.0)
    assert spread(apart).reach(CONFIDENCE) == spread([1.05, 5.05]).reach(CONFIDENCE)
    assert spread([1.0]).reach(CONFIDENCE) == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [3, 5])
def test_intervals_hold_the_truth_whatever_seeds_add_to_documents(num_seeds: int) -> None:
    rng, num_documents, num_runs = np.random.default_rng(0), 12, 800
    for share in (0.0, 1.0, 4.0, 20.0):  # of a seed's variance, in that of its documents' mean
        missed, reaches = 0, []
        for _ in range(num_runs):
            of_seed = rng.normal(0, math.sqrt(share / num_documents), (num_seeds, 1))
            drawn = (of_seed + rng.normal(0, 1, (num_seeds, num_documents))).tolist()
            found, by_seed = spread([Mean(one) for one in drawn]), spread([float(np.mean(one)) for one in drawn])
            missed += abs(found.mean) > found.reach(CONFIDENCE)
            reaches.append((found.reach(CONFIDENCE), by_seed.reach(CONFIDENCE)))
        over_documents, over_seeds = np.median(reaches, axis=0)
        print(f"{num_seeds} seeds, {share:g}: {missed / num_runs:.3f} missed, ± {over_documents:.2f}, {over_seeds:.2f}")
        # Documents alone err most where seeds add as much again and happen to agree: 0.07 for three of them.
        assert missed / num_runs < 0.09
        if share == 0:
            assert over_documents < 0.9 * over_seeds


def test_losses_keep_what_each_document_said() -> None:
    scores = [Likelihood(6.0, 3), Likelihood(1.0, 1)]
    assert nats_per_token(scores) == pytest.approx(7 / 4)
    found = perplexity(scores)
    assert found == pytest.approx(whole_perplexity(scores)) == pytest.approx(math.exp(7 / 4))
    moved = whole_perplexity([Likelihood(6.0 + 3e-6, 3), scores[1]])
    assert moved - found == pytest.approx(3e-6 / 4 * math.exp(7 / 4), rel=1e-3)
    assert np.mean(found.documents) == pytest.approx(float(found))
