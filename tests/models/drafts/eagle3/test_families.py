from pathlib import Path

import numpy as np
import pytest
import torch

from models.core.checkpoints.readout import output_embedding
from models.core.evaluation.scoring import score
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import eagle3, parallel_eagle
from models.targets import describe
from tests.models.families import CAUSAL, write_family

K = 2
SAMPLES = [Sample(str(i), "d", [5, 6, 7 + i], [40 + i, 9, 10, 11, 12, 13, 14, 15], i % 2 / 2) for i in range(8)]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_head_for_a_target_of_any_layout_learns_what_the_target_says(model_type: str, tmp_path: Path) -> None:
    target = write_family(model_type, tmp_path / "target")
    counts = np.bincount([token for one in SAMPLES for token in one.completion_ids], minlength=259)
    draft = eagle3.create(eagle3.Params(vocab_size=64), target, counts)
    report = distill.train(draft, target, SAMPLES, distill.Params(num_epochs=6), K, tmp_path / "work")
    assert report.losses[-1][1] < report.losses[0][1]
    (tmp_path / "draft").mkdir()
    eagle3.save(draft, tmp_path / "draft")
    eagle3.check(tmp_path / "draft", None, describe(target))
    again = eagle3.load(tmp_path / "draft", target)
    scores = score(again, target, SAMPLES, K, tmp_path / "work")
    assert all(one.accepted > 0 for one in scores if int(one.id) % 2)  # those that were sampled


def test_a_head_that_drafts_in_one_pass_is_made_for_another_layout_too(tmp_path: Path) -> None:
    target = write_family("phi", tmp_path / "target")
    draft = parallel_eagle.create(parallel_eagle.Params(vocab_size=64), target, np.ones(259, int))
    assert len(score(draft, target, SAMPLES, K, tmp_path / "work")) == len(SAMPLES)


def test_the_head_says_tokens_at_the_scale_of_its_target(tmp_path: Path) -> None:
    target = write_family("granite", tmp_path)
    head = eagle3.create(eagle3.Params(vocab_size=64), target, np.ones(259, int))
    torch.testing.assert_close(head.lm_head.weight.detach(), output_embedding(target)[head.vocabulary] / 8)
