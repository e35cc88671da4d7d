"""What a draft finds in the prefix cache: τ on a hot system prompt after a swap, and after speculation was off.

    python -m tests.benchmarks.draft_keys TARGET FIRST SECOND

FIRST and SECOND are two drafts of TARGET; every figure is of SECOND alone, without look-up, over the same prompts
behind one system prompt, one stream, greedy. "empty" forgets the cache before each request. Prints one JSON line at the
end.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer
from vllm import SamplingParams

from models.chats import ChatEncoder
from models.engines import vllm as served
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.fields import DraftOptions
from models.sources import chitchat

SYSTEM_TOKENS = 400
SYSTEM = """You are the assistant of a small software company. You help the people who work there and the customers who
write in. Answer in plain English and in the language of the question where that is another. Keep answers short: three
sentences are better than ten, and a list is better than a long paragraph. Say when you do not know something, and do
not make up names, numbers, dates, prices or links. If a question can be read in two ways, say which way you took it and
answer that one. When someone asks for code, write Python unless they name another language, give whole functions with
type hints, and keep comments to what the code does not say itself. Do not use libraries outside of the standard library
unless the question names them. When someone pastes an error message, name the most likely cause first and the fix after
it. When someone is upset, stay calm and polite, say what you can do, and do it. Never ask for passwords, card numbers
or other secrets, and if somebody sends one, tell them to change it. Do not give legal or medical advice; say who can.
Prices and contracts are the sales team's: pass such questions on to sales, with a summary of two sentences. Bugs go to
the support team with the version, the system and the steps that lead there, and if one of the three is missing, ask for
it. The office is open from nine to five on weekdays, answers to mails come within one working day, and the status page
tells of outages. If the question is small talk, answer in kind: be friendly, be brief, and ask something in return.
Numbers have a point for decimals and a comma for thousands, dates are written with the name of the month, and times are
in the reader's own zone if it is known. Titles of books and films are in italics, code is in backticks, and nothing is
in capitals only. If the same question comes again, answer it again without saying so. If an earlier answer was wrong,
say so in one sentence and give the right one. End without a summary and without offering more help."""


class Asked(NamedTuple):
    """One answer."""

    token_ids: tuple[int, ...]
    steps: int
    accepted: int
    first_token_ms: float
    num_prompt: int
    num_cached: int


def prompts(target: Path, count: int) -> list[list[int]]:
    """Return `count` chats behind one system prompt of SYSTEM_TOKENS tokens."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    system = tokenizer.decode(tokenizer.encode(SYSTEM.replace("\n", " "))[:SYSTEM_TOKENS])
    questions = chitchat.prompts(chitchat.Params())[-count:]
    return [
        ChatEncoder.of(tokenizer).encode(
            [{"role": "system", "content": system}, *(m.as_openai() for m in prompt.messages)]
        )
        for prompt in questions
    ]


async def ask(engine: VllmEngine, prompt: list[int], name: str, max_tokens: int) -> Asked:
    """Ask one prompt."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async for output in engine.llm.generate({"prompt_token_ids": prompt}, sampling, name, DraftOptions("head")):
        last: Any = output
    one = last.completion
    return Asked(
        one.token_ids, len(one.accepted), sum(one.accepted), one.first_token_ms, len(prompt), last.num_cached_tokens
    )


async def measure(target: Path, first: Path, second: Path, count: int, max_tokens: int) -> dict[str, list[Asked]]:
    """Return each side's answers, in the order of the prompts."""
    params = served.Params()
    engine = await VllmEngine.start(target, first, params, draft_version="first")
    asked, number = prompts(target, count), 0

    async def all_of(side: str, empty: bool = False) -> list[Asked]:
        nonlocal number
        answers = []
        for prompt in asked:
            if empty:
                await engine.llm.reset_prefix_cache()
            number += 1
            answers.append(await ask(engine, prompt, f"{side}-{number}", max_tokens))
        return answers

    async def warm() -> None:
        await engine.llm.reset_prefix_cache()
        for number in range(2):
            await ask(engine, asked[-1 - number], f"warm-{number}", 8)

    sides = {}
    try:
        await warm()
        await engine.swap_draft(second, "second")
        sides["after a swap"] = await all_of("swap")
        sides["empty"] = await all_of("empty", empty=True)
        await warm()
        sides["hot"] = await all_of("hot")
        await engine.set_speculation(False)
        await warm()
        sides["off"] = await all_of("off")
        await warm()
        await engine.set_speculation(True)
        sides["on after off"] = await all_of("on")
    finally:
        await engine.close()
    return sides


def summarise(sides: dict[str, list[Asked]]) -> dict[str, dict[str, Any]]:
    """Return each side's figures; τ over empty with a 95% interval that resamples prompts."""
    base = sides["empty"]
    rng = np.random.default_rng(0)
    picks = rng.integers(len(base), size=(2000, len(base)))
    figures = {}
    for name, answers in sides.items():
        ratios = [_tau([answers[i] for i in pick]) / _tau([base[i] for i in pick]) for pick in picks.tolist()]
        figures[name] = {
            "tau": round(_tau(answers), 3),
            "over_empty": [
                round(_tau(answers) / _tau(base), 3),
                *np.quantile(ratios, [0.025, 0.975]).round(3).tolist(),
            ],
            "first_token_ms": round(median(one.first_token_ms for one in answers), 1),
            "first_request_ms": round(answers[0].first_token_ms, 1),
            "hit_share": round(sum(a.num_cached for a in answers) / sum(a.num_prompt for a in answers), 3),
            "same_output": sum(a.token_ids == b.token_ids for a, b in zip(answers, base, strict=True)),
        }
    return figures


def _tau(answers: Sequence[Asked]) -> float:
    return 1 + sum(a.accepted for a in answers) / max(sum(a.steps for a in answers), 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure what a draft finds in the prefix cache.")
    for name in ("target", "first", "second"):
        parser.add_argument(name, type=Path, help="a directory")
    parser.add_argument("--prompts", type=int, default=40, help="how many")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    given = parser.parse_args()
    os.environ.update(served.child_environment(served.Params()))
    found = asyncio.run(measure(given.target, given.first, given.second, given.prompts, given.tokens))
    for side, row in (figures := summarise(found)).items():
        print(side, row, flush=True)
    print(json.dumps(figures))
