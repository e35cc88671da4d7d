"""A target in whose text there is something to learn: after token v comes 2v, or less often 2v + 1, all modulo 63.

So the next token hangs on the last one alone, and one that is k places on has 2ᵏ ways to come about. The embedding is
wide enough that the layers hardly change what they are given, and each row of the output matrix is the sum of what its
token may follow.
"""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from models.core.learning.hidden import Sample
from models.engines import Sampling
from models.targets import random
from tests.models.drafts.answered import answer_each

FIRST, NUM = 3, 63
LIKELY, UNLIKELY = 12.0, 11.0  # logits of 2v and of 2v + 1


def build(directory: Path) -> None:
    """Write the target into `directory`."""
    random.build(random.Params(), directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    embedding = 20 * model.model.embed_tokens.weight.detach()
    read = torch.nn.functional.normalize(embedding) / embedding.shape[1] ** 0.5  # of what the last norm gives
    output = torch.zeros_like(embedding)
    for value in range(NUM):
        for added, logit in ((0, LIKELY), (1, UNLIKELY)):
            output[FIRST + (2 * value + added) % NUM] += logit * read[FIRST + value]
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(output)
    model.model.embed_tokens.weight = torch.nn.Parameter(embedding)
    model.to(torch.bfloat16).save_pretrained(directory)


def answers(target: Path, count: int, temperature: float, seed: int) -> list[Sample]:
    """Return answers of the target to prompts that a seed draws."""
    rng = torch.Generator().manual_seed(seed)
    asked = [torch.randint(FIRST, FIRST + NUM, (4,), generator=rng).tolist() for _ in range(count)]
    samplings = [
        Sampling(max_tokens=24, ignore_eos=True, temperature=temperature, seed=1000 * seed + number)
        for number in range(count)
    ]
    return [
        Sample(f"{temperature}-{seed}-{number}", "d", prompt, list(answer.token_ids), temperature)
        for number, (prompt, answer) in enumerate(zip(asked, answer_each(target, None, asked, samplings), strict=True))
    ]
