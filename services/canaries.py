"""The canary prompts: the served draft is asked golden prompts again, after all traffic, and its answers are judged."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from infra.versions import Version
from models.engines import Completion, Engine
from models.evaluation.canary import Answer, Finding, Params, has_fallen, judge, lost_on_canaries
from models.evaluation.golden import Golden, equal_output
from services.probation import answer, answers, differs_itself

# Turn in a full engine: after every request, whose turn is how many sequences their key runs.
LAST = 1 << 16
NUM_LOOKS = 2


class Look(NamedTuple):
    """What was found, in a word and in a line."""

    finding: Finding
    text: str


async def look(
    engine: Engine,
    version: Version,
    goldens: Sequence[Golden],
    threshold: float,
    reference: Sequence[Answer],
    lost_on_traffic: Callable[[], float | None],
    params: Params,
) -> Look:
    """Ask the draft that serves; a fall is believed when a second look sees it too.

    Where an output differs, the target alone is asked for it, with the engine's speculation off; the caller knows
    whether it is wanted afterwards.

    Args:
        engine: speculating with the draft.
        version: its registry entry.
        goldens: the target's reference outputs, from the first.
        threshold: near-tie rule of `equal_output`.
        reference: what the draft answered on probation.
        lost_on_traffic: returns the share of the promised gain that is missing on its last requests.
        params: what counts as a fall.
    """
    asked, name = goldens[: len(reference)], f"probe-{version.number}-canary"
    lost = None
    for _ in range(NUM_LOOKS):
        completions: list[Completion] = []
        for golden in asked:  # one at a time, so that a user shares the engine with one of them at most
            completions += await answer(engine, [golden], f"{name}-{len(completions)}", LAST)
        pairs = zip(asked, completions, strict=True)
        if any(equal_output(golden, one.token_ids, threshold) == "different" for golden, one in pairs):
            own = await differs_itself(engine, asked, completions, threshold, name, LAST)
            if own is None:
                return Look(Finding.TARGET, "the target alone parts from its reference on a canary prompt")
            return Look(Finding.PAIR, f"with draft {version.number} canary prompt {own} gives another output")
        lost = lost_on_canaries(reference, answers(completions))
        if not has_fallen(lost, params):
            return Look(Finding.SOUND, "")
    traffic = lost_on_traffic()
    said = "too little traffic to say" if traffic is None else f"{traffic:.0%} on traffic"
    return Look(judge(lost, traffic, params), f"draft {version.number} lost {lost:.0%} on canary prompts, {said}")
