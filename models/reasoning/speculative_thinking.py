"""Speculative Thinking: the small model writes, and the target takes over where the text begins to reflect.

Between two steps the small model begins the next one. If that has a cue, a word that affirms, reflects or verifies, the
target writes the beginning anew; if what stands there then verifies, the target goes on with the check. When as many
beginnings have turned back as are allowed, a sentence is put in that asks for a check, and the target writes that.

Which cues and how many tokens is from the paper's code, which throws a beginning without a cue away to write the step
anew; here it is kept, which is the same text where decoding is greedy.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from models.params import BaseParams
from models.reasoning import Answer, Step, Steps, Writers

PAPER = "arXiv:2504.12329, algorithm 1"
Words = tuple[str, ...]


class Params(BaseParams):
    """What the target takes over at, and for how long.

    Attributes:
        affirms, reflects, verifies: cues, in small letters.
        takeover_tokens: how long the beginning of a step is.
        keeps_target: whether the target's beginning is always kept; else only where it leans the other way.
        check_tokens: how long the target writes a check.
        recap_text: what is put in when too many steps have turned back; "" puts in nothing.
        recap_after: how many are allowed, at first.
        recap_after_more: how many more after each time.
        recap_after_most: how many at most.
        recap_tokens: how long the target then writes, at first.
        recap_tokens_more: how much longer after each time.
        recap_tokens_most: how long at most.
        max_step_tokens: a longer step is looked at no sooner.
    """

    name: Literal["speculative_thinking"] = "speculative_thinking"
    affirms: Words = ("yeah", "yes", "final answer", "confident")
    reflects: Words = ("wait", "alternatively", "hold on", "another")
    verifies: Words = ("verify", "think again", "recap", "check")
    takeover_tokens: int = Field(20, ge=1)
    keeps_target: bool = True
    check_tokens: int = Field(125, ge=1)
    recap_text: str = "Let me check whether there are some wrong steps:"
    recap_after: int = Field(15, ge=1)
    recap_after_more: int = Field(5, ge=0)
    recap_after_most: int = Field(30, ge=1)
    recap_tokens: int = Field(125, ge=1)
    recap_tokens_more: int = Field(25, ge=0)
    recap_tokens_most: int = Field(200, ge=1)
    max_step_tokens: int = Field(1024, ge=1)


async def think(writers: Writers, prompt_ids: Sequence[int], max_tokens: int, params: Params) -> Steps:
    """Write an answer; see `models.reasoning`."""
    answer = Answer(writers, prompt_ids, max_tokens)
    turned_back, allowed, recap_tokens = 0, params.recap_after, params.recap_tokens
    while not answer.done:
        if not answer.at_boundary:
            yield answer.take(await answer.write("small", params.max_step_tokens), "small")
        elif turned_back >= allowed:
            asked = writers.vocabulary.ids(params.recap_text)
            if asked:
                yield answer.take(asked, "target")
            if not answer.done:
                yield answer.take(await answer.write("target", recap_tokens, whole_steps=False), "target")
            turned_back, allowed = 0, min(allowed + params.recap_after_more, params.recap_after_most)
            recap_tokens = min(recap_tokens + params.recap_tokens_more, params.recap_tokens_most)
        else:
            step = await _begin(writers, answer, params)
            yield step
            said = writers.vocabulary.text(step.token_ids)
            turned_back += leaning(said, params) < 0
            if not answer.done and any(word in said.lower() for word in params.verifies):
                yield answer.take(await answer.write("target", params.check_tokens, whole_steps=False), "target")


def leaning(text: str, params: Params) -> int:
    """Return 1 where a text affirms, −1 where it turns back as often or more, 0 where it has no cue."""
    small = text.lower()
    affirms = sum(small.count(word) for word in params.affirms)
    turns_back = sum(small.count(word) for word in (*params.reflects, *params.verifies))
    return 0 if not affirms and not turns_back else 1 if affirms > turns_back else -1


async def _begin(writers: Writers, answer: Answer, params: Params) -> Step:
    """Begin a step: by the small model, or, at a cue, by the target."""
    begun = await answer.write("small", params.takeover_tokens)
    leans = leaning(writers.vocabulary.text(begun), params)
    if leans == 0:
        return answer.take(begun, "small")
    own = await answer.write("target", params.takeover_tokens)
    other = leaning(writers.vocabulary.text(own), params)
    if params.keeps_target or leans * other < 0 or (leans < 0 and other == 0):
        return answer.take(own, "target", given_up=len(begun))
    return answer.take(begun, "small")
