"""On a GPU every family learns and is scored as on a processor; what it drafts there: test_torch_families."""

from pathlib import Path

import pytest
import torch

from models import catalog
from models.core.checkpoints.loading import load_model
from models.core.drafting.draft_families import family_named, is_trained
from models.core.evaluation.likeness import accepted
from models.core.evaluation.scoring import score
from models.core.learning import distill
from models.engines import Sampling
from tests.models import planted
from tests.models.drafts.answered import GREEDY, answer_all, answer_each, prompts
from tests.models.drafts.tiny import make_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")

TRAINED = [name for name in catalog.names("drafts") if is_trained(family_named(name))]
ASKED = prompts(2)
K = 4


def test_a_seed_draws_the_same_tokens_again(tiny_target: Path) -> None:
    draft = make_tiny(family_named("eagle3"), tiny_target)
    sampling = Sampling(max_tokens=24, ignore_eos=True, temperature=1.0, seed=7)
    answers = answer_each(tiny_target, draft, ASKED[:1] * 2, [sampling] * 2, device="cuda", num_draft_tokens=K)
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].token_ids != answer_all(tiny_target, draft, ASKED[:1], GREEDY, device="cuda")[0].token_ids


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_learnt_there_is_accepted_as_on_a_processor(name: str, tmp_path: Path) -> None:
    planted.build(tmp_path / "target")
    samples = planted.answers(tmp_path / "target", 24, 0.0, seed=0)
    draft = make_tiny(family_named(name), tmp_path / "target")
    params = distill.Params(num_epochs=2, batch_tokens=256, num_threads=1)
    distill.train(draft, tmp_path / "target", samples, params, K, tmp_path / "work", device="cuda")
    there, here = (
        score(draft, tmp_path / "target", samples[:8], K, tmp_path / device, device) for device in ("cuda", "cpu")
    )
    accepted = [[one.accepted for one in scores] for scores in (there, here)]
    assert sum(accepted[0]) == pytest.approx(sum(accepted[1]), rel=0.05, abs=2)


def test_a_changed_targets_answers_are_accepted_as_on_a_processor(tiny_target: Path, tmp_path: Path) -> None:
    draft = make_tiny(family_named("eagle3"), tiny_target)
    there, here = (
        accepted(
            draft, load_model(tiny_target, device=device), [prompt[:8] for prompt in ASKED], K, 24, tmp_path / device
        )
        for device in ("cuda", "cpu")
    )
    assert [one.steps for one in there] == pytest.approx([one.steps for one in here], abs=2)
