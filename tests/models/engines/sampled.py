"""The reference engine, and whether what one samples follows its target: χ² against the library's distribution."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from models.core.drafting.sampling import probabilities
from models.core.layers.decoder import Decoder
from models.drafts import Draft
from models.engines import Sampling, Way
from models.engines.torch import Params, TorchEngine
from tests.models.drafts.answered import prompts

NUM_DRAWS, NUM_TOKENS = 20, 17  # of a draft that lies about q the p-value is below 1e-7
P_VALUE = 1e-4


@asynccontextmanager
async def started(target: Path, draft: Path | Draft | None, **changes: object) -> AsyncIterator[TorchEngine]:
    """Start the reference engine, with a draft as it is in float32, or loaded; end it with the block."""
    if isinstance(draft, Draft):
        engine = TorchEngine(Decoder.load(target, torch.float32), target, draft, None, Params(**changes))
    else:
        engine = await TorchEngine.start(target, draft, Params(**changes), draft_version="1")
    try:
        yield engine
    finally:
        await engine.close()


def sampled_p_value(
    target: Path,
    draft: Path | Draft,
    num_draft_tokens: int = 3,
    rule: str = "rejection",
    tree: str = "chain",
    lengths: str = "fixed",
    drafting: Way = "head",
    **changes: object,
) -> float:
    """χ² of all tokens after the first ones, each against the library's distribution given the tokens before it."""
    prompt = prompts(1)[0]
    settings = Sampling(temperature=0.8, top_k=40, max_tokens=NUM_TOKENS, ignore_eos=True, drafting=drafting)

    async def draw() -> list[tuple[int, ...]]:
        ways = {"verify": {"name": rule}, "trees": {"name": tree}, "lengths": {"name": lengths}}
        seeded = [settings.model_copy(update={"seed": seed}) for seed in range(NUM_DRAWS)]
        keys = {"dtype": "float32", "num_draft_tokens": num_draft_tokens, **ways, **changes}
        async with started(target, draft, **keys) as engine:
            return [(await engine.generate(prompt, sampling, "s")).token_ids for sampling in seeded]

    return p_value(target, prompt, asyncio.run(draw()), settings)


def p_value(target: Path, prompt: Sequence[int], answers: Sequence[Sequence[int]], settings: Sampling) -> float:
    """χ² of all tokens of answers to one prompt after their first ones, which are all of one length."""
    drawn = torch.tensor(answers)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        token_ids = torch.cat([torch.tensor([prompt]).expand(len(drawn), -1), drawn], dim=-1)
        logits = model(token_ids).logits[:, len(prompt) : -1].flatten(0, 1)
    expected = probabilities(logits, settings).double().sum(0).numpy()
    counts = np.bincount(drawn[:, 1:].flatten().numpy(), minlength=259)
    order = np.argsort(expected)
    rare = np.isin(np.arange(259), order[np.cumsum(expected[order]) < 20])
    pooled = [np.append(values[~rare], values[rare].sum()) for values in (counts, expected)]
    return float(chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue)
