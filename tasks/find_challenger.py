"""Find out what the training on a window starts from."""

from infra.artifacts import Artifact, open_artifact, publish
from infra.registry import Registry, open_registry
from infra.settings import load_settings
from infra.store import ObjectMissing
from infra.versions import Pair, Version, challenger_to_go_on, next_challenger
from infra.windows import Window
from models.core.evaluation.gate import Evidence
from models.recipe import Recipe
from models.types import Frozen
from tasks.stages.task import run_logger, task

EVIDENCE = "evidence.json"


class Start(Frozen):
    """Where a challenger's next run starts: the checkpoint that it resumes, or the champion, and its weights.

    `state` is the end of the run that made it, None where that is not there and the optimizer starts afresh; `evidence`
    is what is known of the challenger so far.
    """

    version: Version
    files: Artifact
    state: Artifact | None
    evidence: Evidence


@task
def find_challenger(recipe: Recipe, pair: Pair, window: Window) -> Start:
    """Return where the training on a window starts: the champion's challenger, or the champion for a new one.

    A challenger whose evidence is gone, or was found at another K, learns on; its test starts anew, as another
    challenger's.
    """
    registry, champion = open_registry(), pair.draft
    checkpoint, evidence = known_of_challenger(registry, champion.number, window.first_seq, recipe.num_draft_tokens)
    version, files = champion, pair.draft_files
    if checkpoint is not None:
        version, files = checkpoint, publish(registry.download(checkpoint, load_settings().cache), "draft")
    how = "starts" if checkpoint is None else f"goes on from draft {checkpoint.number}"
    run_logger().info("challenger %d of draft %d %s", evidence.challenger, champion.number, how)
    return Start(version=version, files=files, state=_state(version), evidence=evidence)


def known_of_challenger(
    registry: Registry, champion: int, first_seq: int, num_draft_tokens: int
) -> tuple[Version | None, Evidence]:
    """Return the checkpoint that the training on rows from `first_seq` on resumes, if any, and what is known of it."""
    versions = registry.versions("draft")
    checkpoint = challenger_to_go_on(versions, champion, first_seq)
    kept = None if checkpoint is None else registry.attached(checkpoint, EVIDENCE)
    evidence = None if kept is None else Evidence.model_validate_json(kept)
    if evidence is None or evidence.test.bound != num_draft_tokens:
        evidence = Evidence.start(num_draft_tokens, next_challenger(versions, champion))
    return checkpoint, evidence


@task
def start_test(recipe: Recipe, pair: Pair) -> Evidence:
    """Return what is known of a draft that was not gated against the champion before: nothing."""
    return Evidence.start(
        recipe.num_draft_tokens, next_challenger(open_registry().versions("draft"), pair.draft.number)
    )


def _state(version: Version) -> Artifact | None:
    """Return what a version's training left, None if it left nothing or that is no longer there."""
    lineage = version.lineage
    if not lineage.state_uri:
        return None
    state = Artifact(uri=lineage.state_uri, sha256=lineage.state_sha256, kind="state")
    try:
        open_artifact(state)
    except (ValueError, ObjectMissing) as error:
        run_logger().info("the optimizer starts afresh: %s", error)
        return None
    return state
