"""Measure what steps take in the engine at hand, before it serves."""

import asyncio
import logging
import time

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from models.engines.vllm.drafting import MEASURE, WISHES, Wishes
from models.engines.vllm.engine import VllmEngine
from models.engines.vllm.turns import cycles, turns

# Times that all is measured, some time apart, since what else runs on the machine comes and goes.
NUM_ROUNDS = 2
# Tokens of each prompt: about as many as a short chat has, since attention takes its time by them. All are alike, so
# that only the first of them is read in full.
NUM_PROMPT_TOKENS = 129
# Answers, and tokens of each, whose fastest tells what a plain step takes: what else runs can only make it longer.
NUM_PLAIN, PLAIN_TOKENS = 5, 16

log = logging.getLogger(__name__)


async def measure(engine: VllmEngine) -> None:
    """Measure what steps of an engine take, for some seconds at most; what an earlier engine left is taken as it is.

    Plain steps of one sequence are timed in any engine that keeps its times, for the choice of the next one's mode.
    Where steps are planned, all are: by numbers of sequences, rows and passes.
    """
    if engine.times.plain_ms(engine.mode.eager) is None:
        plain_ms = min([await _plain_ms(engine, f"measure-plain-{number}") for number in range(NUM_PLAIN)])
        try:
            engine.times.keep(engine.mode.eager, plain_ms)
        except OSError as error:
            log.warning("what a plain step takes was not kept: %s", error.strerror)
    setup = engine.setup
    if setup is None or setup.known_cost() is not None:
        return
    for number in range(NUM_ROUNDS):
        for num, num_cycles in cycles(engine.llm.vllm_config.scheduler_config.max_num_seqs).items():
            wishes, num_steps = Wishes(MEASURE, domain=str(num)), num_cycles * len(turns(num, setup.lookup.num_tokens))
            name = f"measure-{number}-{num}"  # the first token is read off the prompt
            await asyncio.gather(*(_answer(engine, wishes, num_steps + 1, f"{name}-{at}") for at in range(num)))


async def _plain_ms(engine: VllmEngine, request_id: str) -> float:
    """Return milliseconds of a step, over the tokens of an answer after its first."""
    times_s = await _answer(engine, Wishes("off"), PLAIN_TOKENS, request_id)
    return 1000 * (times_s[-1] - times_s[0]) / (len(times_s) - 1)


async def _answer(engine: VllmEngine, wishes: Wishes, num_tokens: int, request_id: str) -> list[float]:
    """Return when each output came; nobody is told of the request."""
    most = engine.llm.vllm_config.model_config.max_model_len // 2
    prompt = TokensPrompt(prompt_token_ids=[1] * min(NUM_PROMPT_TOKENS, most))
    wanted = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    wanted.extra_args = {WISHES: wishes}
    return [time.monotonic() async for _ in AsyncLLM.generate(engine.llm, prompt, wanted, request_id)]
