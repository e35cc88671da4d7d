"""The test over promoted drafts: a real registry, query log and scoring; drafts that are the target, or its noise."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from infra.artifacts import Artifact, staged
from infra.consent import Consent
from infra.post_promotion import (
    FAILED,
    PASSED,
    ROLLED_BACK,
    RUNNING,
    SUPERSEDED,
    WORK,
    PostPromotionTest,
    PostPromotionTests,
)
from infra.querylog import QueryLog
from infra.registry import Registry
from infra.rollout_store import RolloutStore
from infra.rollouts import Joined, Named, Seen
from infra.settings import load_settings
from infra.versions import label
from models.core.checkpoints.loading import load_floats, load_model
from models.core.drafting.draft_format import made_for
from models.core.learning.answering import NO_STOPS, Ask, go_on
from models.drafts import lm
from models.recipe import Recipe, load_recipe
from models.targets import describe
from models.types import RolloutParams
from tasks.post_promotion_test import EVIDENCE, check_promoted_draft
from tests.conftest import shake
from tests.tags import draft_tags
from tests.tasks.made import row_of

NUM_PROMPTS = 120
NOISE = {"good": 0.0, "same": 1e-6, "worse": 0.05}


class Answer(NamedTuple):
    prompt_ids: list[int]
    completion_ids: list[int]


class Scene(NamedTuple):
    """A home whose draft 1, which says what the target says, was replaced by draft 2."""

    registry: Registry
    log: QueryLog
    tests: PostPromotionTests
    answers: Sequence[Answer]

    def promote(self, drafts: Path, name: str) -> int:
        number = self.registry.register("draft", drafts / name, draft_tags()).number
        self.registry.promote("draft", number)
        return number

    def serve(self, first: int, last: int, draft: int = 2, consent: Consent = "full", **told: object) -> None:
        served = {"domain": "chat", "sampling": {"temperature": 0.0}, "draft_version": draft, "consent": consent}
        said = [answer._asdict() if consent == "full" else {} for answer in self.answers[first:last]]
        names = (f"{consent}-{draft}-{number}" for number in range(first, last))
        self.log.append([row_of(name, **served, **told, **ids) for name, ids in zip(names, said, strict=True)])

    def champion(self) -> int | None:
        found = self.registry.champion("draft")
        return None if found is None else found.number


@pytest.fixture(scope="module")
def answers(tiny_target: Path) -> list[Answer]:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 67) for _ in range(6)] for _ in range(NUM_PROMPTS)]
    model = load_model(tiny_target, torch.float32, "cpu")
    said = go_on(model, [Ask(prompt, 16) for prompt in prompts], NO_STOPS, torch.Generator())
    return [Answer(*one) for one in zip(prompts, said, strict=True)]


@pytest.fixture(scope="module")
def drafts(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    for name, noise in NOISE.items():
        model = load_floats(tiny_target)
        model.config.redraft = made_for(describe(tiny_target))
        shake(model, noise, seed=0)
        with staged(folder / name) as directory:
            lm.save(lm.Lm(model), directory)
    return folder


@pytest.fixture
def scene(registry: Registry, target: Artifact, drafts: Path, answers: list[Answer]) -> Scene:
    settings = load_settings()
    registry.promote("target", registry.register("target", target.path, draft_tags()).number)
    scene = Scene(registry, QueryLog(settings.querylog), PostPromotionTests(settings), answers)
    scene.promote(drafts, "good")
    return scene


def recipe(**changed: object) -> Recipe:
    tiny = load_recipe("tiny")
    asked = tiny.post_promotion_test.model_copy(update={"max_wait_s": 0.0, **changed})
    return tiny.model_copy(update={"post_promotion_test": asked})


def looked(imported: bool = False, **changed: object) -> PostPromotionTest:
    test = check_promoted_draft.fn(recipe(**changed), imported)
    assert test is not None
    return test


def seqs(test: PostPromotionTest) -> list[int]:
    return sorted(one.seq for one in test.compared)


@pytest.mark.slow
def test_a_draft_that_does_worse_is_taken_back_with_the_evidence(scene: Scene, drafts: Path, tmp_path: Path) -> None:
    worse = scene.promote(drafts, "worse")
    for first in range(0, NUM_PROMPTS, 8):
        scene.serve(first, first + 8)
        test = looked(per_look=8)
        if test.outcome != RUNNING:
            break
    assert (test.outcome, test.draft, test.previous, scene.champion()) == (ROLLED_BACK, worse, 1, 1)
    version = scene.registry.get("draft", worse)
    assert version.quarantined.startswith(f"{test.told()}; evidence: runs:/{test.evidence}/")
    assert "of draft 1 on the same" in test.told()
    assert f"{len(test.compared)} requests" in test.told()
    kept = scene.registry.store.client.download_artifacts(test.evidence, EVIDENCE, str(tmp_path))
    evidence = PostPromotionTest.model_validate_json(Path(kept).read_bytes())
    assert evidence.compared == test.compared
    assert len({compared.seq for compared in evidence.compared}) == len(evidence.compared)
    assert evidence.found[""].tau < 0.9 * evidence.found[""].previous_tau
    assert check_promoted_draft.fn(recipe()) is None  # nothing was served before draft 1
    assert not (scene.tests.folder / WORK).exists()


@pytest.mark.slow
def test_a_draft_that_is_no_worse_is_settled_and_then_left_alone(scene: Scene, drafts: Path) -> None:
    scene.promote(drafts, "same")
    scene.serve(0, 50)
    assert looked(per_look=30, num_requests=40).outcome == RUNNING
    scene.serve(50, 100)
    settled = looked(per_look=30, num_requests=40)
    assert (settled.outcome, len(settled.compared), scene.champion()) == (PASSED, 40, 2)
    scene.serve(100, 120)
    assert looked(per_look=30, num_requests=40) == settled


@pytest.mark.slow
def test_a_draft_that_passes_on_the_canary_is_told_to_its_fleet_at_that_look_and_later(
    scene: Scene, drafts: Path
) -> None:
    draft = scene.registry.get("draft", scene.promote(drafts, "same"))
    store = RolloutStore(load_settings().querylog, "target abc", RolloutParams())
    store.tell(Joined(names=("canary", "other")), Named(champion=label(draft)))
    has = Seen(name="canary", version=label(draft), proven=True, failed={})
    assert not store.tell(has).tested
    scene.serve(0, 8)
    assert looked(num_requests=8).outcome == PASSED and store.tell().tested
    store.tell(Named(champion=label(scene.registry.roll_back("draft"))))
    scene.registry.promote("draft", draft.number)
    assert not store.tell(Named(champion=label(draft)), has).tested
    assert looked(num_requests=8).outcome == PASSED and store.tell().tested


@pytest.mark.slow
def test_a_request_counts_once_and_only_with_the_draft_that_served_it(scene: Scene, drafts: Path) -> None:
    scene.serve(0, 20, draft=1)
    scene.promote(drafts, "same")
    scene.serve(20, 40)
    first = looked(per_look=30)
    assert seqs(first) == list(range(21, 41))
    assert looked(per_look=30) == first
    scene.serve(40, 44)
    scene.serve(44, 48, structured=True)  # a grammar took away what the drafts are compared by
    assert seqs(looked(per_look=30)) == list(range(21, 45))


@pytest.mark.slow
def test_of_requests_that_are_alike_or_that_a_client_says_belong_together_one_counts(
    scene: Scene, drafts: Path
) -> None:
    scene.promote(drafts, "same")
    scene.serve(0, 10)
    assert len(looked().compared) == 10
    asked = scene.log.rows(1, 10)
    scene.log.append([row.model_copy(update={"seq": None, "id": f"again-{row.seq}"}) for row in asked])
    assert len(looked().compared) == 10
    rng = random.Random(1)
    text = [rng.randrange(3, 67) for _ in range(60)]
    alike = [{"seq": None, "id": f"alike-{token}", "prompt_ids": [*text, token]} for token in range(70, 74)]
    scene.log.append([asked[0].model_copy(update=one) for one in alike])
    assert len(looked().compared) == 11
    scene.serve(10, 16, group="a" * 64)
    scene.serve(16, 22, group="b" * 64)
    scene.serve(22, 30)
    assert len(looked().compared) == 21


@pytest.mark.slow
def test_a_few_requests_wait_until_there_are_more_or_time_has_passed(scene: Scene, drafts: Path) -> None:
    scene.promote(drafts, "same")
    for first, last, num_compared in ((0, 10, 8), (10, 14, 8), (14, 16, 16)):
        scene.serve(first, last)
        assert len(looked(per_look=8, max_wait_s=3600.0).compared) == num_compared


@pytest.mark.slow
def test_where_no_request_may_be_read_it_is_blind(scene: Scene, drafts: Path) -> None:
    scene.promote(drafts, "worse")
    assert looked().blind  # nothing of what it served was logged, as where every request asks for that
    kept = scene.tests.of_draft(2)  # which `redraft status` shows
    assert kept is not None
    assert kept.told() == "blind, no request of draft 2 may be read"
    scene.serve(0, 20, consent="metadata")
    blind = looked()
    assert (blind.blind, blind.num_unreadable, blind.compared) == (True, 20, ())
    assert looked() == blind
    scene.serve(0, 5)
    assert not looked().blind


@pytest.mark.slow
def test_where_no_row_can_name_a_draft_those_count_that_were_imported_since(scene: Scene, drafts: Path) -> None:
    scene.serve(0, 20, draft=1)
    scene.promote(drafts, "same")
    since_ms = scene.registry.get("draft", 2).created_ms + 1
    for first, time_ms in ((1, 1), (11, since_ms)):
        said = {"seq": None, "draft_version": None, "time_ms": time_ms}
        served = scene.log.rows(first, first + 9)
        scene.log.append([row.model_copy(update=said | {"id": f"import-{row.seq}"}) for row in served])
    assert looked().blind
    assert seqs(looked(imported=True)) == list(range(31, 41))


@pytest.mark.slow
def test_one_that_was_killed_before_it_acted_goes_on(scene: Scene, drafts: Path) -> None:
    scene.promote(drafts, "worse")
    scene.serve(0, 100)
    scene.tests.save(looked(per_look=8).model_copy(update={"outcome": FAILED}))
    left = scene.tests.folder / WORK
    left.mkdir()
    (left / "states.bin").write_text("text")
    assert looked().outcome == ROLLED_BACK
    assert (scene.champion(), left.exists(), scene.tests.unfinished()) == (1, False, [])


@pytest.mark.slow
def test_what_a_person_did_meanwhile_stays_and_a_new_champion_is_tested_anew(scene: Scene, drafts: Path) -> None:
    scene.promote(drafts, "worse")
    scene.serve(0, 20)
    lost = looked(per_look=8).model_copy(update={"outcome": FAILED})
    chosen = scene.promote(drafts, "same")
    scene.tests.save(lost)
    assert looked().outcome == SUPERSEDED
    assert (scene.champion(), scene.registry.get("draft", 2).quarantined) == (chosen, "")
    test = looked()
    assert (test.draft, test.previous, test.compared) == (3, 2, ())


def test_without_a_draft_before_it_there_is_nothing_to_test(scene: Scene) -> None:
    assert check_promoted_draft.fn(recipe()) is None
