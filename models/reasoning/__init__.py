"""Answers that two models write in turn, step by step: a small one where that will do, the target where it must.

A step ends with a token that holds a blank line, or, where no token of the vocabulary does, with the end of a line.
This is not lossless: of what the small model wrote the target has only approved, or not even that. So an answer says
so, and no draft learns from it.

Both models read and write the same token ids. A method has `PAPER`, `Params`, and

    think(writers, prompt_ids, max_tokens, params) -> Steps

which yields what is added to an answer, at least a token each and at most `max_tokens` in all, until an answer ends.
It raises ValueError where the prompt is empty or leaves no room. Its law: where the small model is the target itself,
and nothing is put in, the greedy answer is the target's own.
"""

from collections.abc import AsyncGenerator, Sequence
from itertools import count
from typing import Any, Literal, NamedTuple

from models.engines import Engine, Sampling

By = Literal["small", "target"]


class Step(NamedTuple):
    token_ids: tuple[int, ...]  # at least one
    by: By
    score: int | None = None  # from 0 to 9, of the small model's step; None if the target was not asked, or had no room
    given_up: int = 0  # tokens of the small model that were rejected here


Steps = AsyncGenerator[Step, None]


class Writers:
    """Two running engines over one vocabulary, for one answer."""

    def __init__(
        self, small: Engine, target: Engine, vocabulary: "Vocabulary", max_model_len: int, sampling: Sampling, name: str
    ) -> None:
        """Take what the answer is written with; of a seed of `sampling` each call has one that follows.

        `max_model_len` is how many tokens both can read, the answer included; no other answer on its way has `name`.
        """
        self._engines: dict[By, Engine] = {"small": small, "target": target}
        self.vocabulary, self.max_model_len = vocabulary, max_model_len
        self._sampling, self._name, self._calls = sampling, name, count()

    async def write(
        self, by: By, token_ids: Sequence[int], max_tokens: int, whole_steps: bool = True
    ) -> tuple[int, ...]:
        """Go on with a text by at most so many tokens, and until a step ends where `whole_steps`. At least one token is
        written; the last one says why it ended: see `Vocabulary`."""
        return await self._generate(by, token_ids, max_tokens, self.vocabulary.step_ends if whole_steps else ())

    async def likeliest(self, token_ids: Sequence[int]) -> int | None:
        """Return the target's likeliest next token; None where the text leaves no room for it."""
        if len(token_ids) >= self.max_model_len:
            return None
        return (await self._generate("target", token_ids, 1, (), temperature=0.0))[0]

    async def _generate(
        self, by: By, token_ids: Sequence[int], max_tokens: int, stop_ids: Sequence[int], **changes: object
    ) -> tuple[int, ...]:
        number = next(self._calls)
        seed = None if self._sampling.seed is None else self._sampling.seed + number
        own = {"max_tokens": max_tokens, "stop_ids": tuple(stop_ids), "seed": seed} | changes
        sampling = self._sampling.model_copy(update=own)
        return (await self._engines[by].generate([*token_ids], sampling, f"{self._name}-{number}")).token_ids


class Vocabulary:
    """What both models write in, with the tokens that end a step or an answer."""

    def __init__(self, tokenizer: Any, answer_ends: frozenset[int]) -> None:
        """Look through all tokens of a Hugging Face tokenizer once, which takes a second of a large vocabulary."""
        self._tokenizer, self.answer_ends = tokenizer, answer_ends
        texts = tokenizer.batch_decode([[number] for number in range(len(tokenizer))])
        found = [tuple(number for number, text in enumerate(texts) if end in text) for end in ("\n\n", "\n")]
        self.step_ends = found[0] or found[1]

    def text(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


class Answer:
    """An answer as far as it is written: its `text`, prompt included, and how many more tokens are `left`."""

    def __init__(self, writers: Writers, prompt_ids: Sequence[int], max_tokens: int) -> None:
        """Begin one; ValueError if the prompt is empty, or leaves no room for what is asked."""
        if not prompt_ids:
            raise ValueError("the prompt is empty; wanted at least one token")
        if max_tokens < 1 or len(prompt_ids) + max_tokens > writers.max_model_len:
            room = writers.max_model_len - len(prompt_ids)
            raise ValueError(f"max_tokens is {max_tokens}; wanted 1 to {room}, which the prompt leaves of the context")
        self.text, self.left, self.done, self.at_boundary = [*prompt_ids], max_tokens, False, False
        self._writers = writers

    async def write(self, by: By, max_tokens: int, whole_steps: bool = True) -> tuple[int, ...]:
        """Return how somebody would go on, at most as far as there is room; `take` takes it."""
        return await self._writers.write(by, self.text, min(self.left, max_tokens), whole_steps)

    def take(self, token_ids: Sequence[int], by: By, score: int | None = None, given_up: int = 0) -> Step:
        """Add tokens, and return them as a step; what there is no room for is cut off."""
        taken = tuple(token_ids[: self.left])
        self.text += taken
        self.left -= len(taken)
        vocabulary = self._writers.vocabulary
        self.done = self.left == 0 or taken[-1] in vocabulary.answer_ends
        self.at_boundary = taken[-1] in vocabulary.step_ends
        return Step(taken, by, score, given_up)
