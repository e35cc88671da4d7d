"""SpecReason: the small model writes each step, the target scores it, and writes those itself that it does not like.

The score is one token, read off behind a question that follows the text: the digit that the target is likeliest to say,
and 0 if that is no digit, as in the paper's code. The question stands in the answer's own turn, so that no template is
needed, and the target has read all before it already. What there is no room to ask about is not kept.
"""

from collections.abc import Sequence
from itertools import count
from typing import Literal

from pydantic import Field

from models.params import BaseParams
from models.reasoning import Answer, Steps, Writers

PAPER = "arXiv:2504.07891, section 4.1"
QUESTION = (
    "\n\nIs the last step above true, and does it follow from those before it? Its style and its use do not count. "
    "As a digit from 0, for not at all, to 9, its score is: "
)


class Params(BaseParams):
    """When the target takes over.

    Attributes:
        threshold: score from which on a step of the small model is kept; 0 keeps all that can be asked about, 10 none.
        num_first: steps at the beginning that the target writes itself.
        max_step_tokens: a longer step is cut into several.
    """

    name: Literal["spec_reason"] = "spec_reason"
    threshold: int = Field(7, ge=0, le=10)
    num_first: int = Field(0, ge=0)
    max_step_tokens: int = Field(512, ge=1)


async def think(writers: Writers, prompt_ids: Sequence[int], max_tokens: int, params: Params) -> Steps:
    """Write an answer; see `models.reasoning`."""
    answer = Answer(writers, prompt_ids, max_tokens)
    for number in count():
        if answer.done:
            return
        tried: tuple[int, ...] = ()
        score: int | None = None
        if number >= params.num_first:
            tried = await answer.write("small", params.max_step_tokens)
            score = await _score(writers, [*answer.text, *tried])
        if score is not None and score >= params.threshold:
            yield answer.take(tried, "small", score)
        else:
            own = await answer.write("target", params.max_step_tokens)
            yield answer.take(own, "target", score, given_up=len(tried))


async def _score(writers: Writers, token_ids: list[int]) -> int | None:
    """Return what the target gives the last step of a text, from 0 to 9; None where it has no room to say so."""
    vocabulary = writers.vocabulary
    read = token_ids[:-1] if token_ids[-1] in vocabulary.answer_ends else token_ids
    said = await writers.likeliest([*read, *vocabulary.ids(QUESTION)])
    if said is None:
        return None
    digit = vocabulary.text([said]).strip()
    return int(digit) if digit.isascii() and digit.isdigit() and len(digit) == 1 else 0
