"""Send a recipe's prompts to a running service and sum up what became of them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from infra.client import Answer, Client
from models.recipe import Recipe, Traffic
from models.sources import Prompt
from models.types import Frozen
from tasks.select_data import as_chats, choose_prompts
from tasks.stages.task import task


class TrafficReport(Frozen):
    """A set of requests: how many were answered to the end, and status to number of the others.

    Attributes:
        tau: 1 + accepted / steps over all requests, None if nothing was verified.
        draft_versions: version to the number of requests that it drafted for.
    """

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    tau: float | None
    tokens_per_s: float
    seconds: float
    draft_versions: dict[str, int]


def choose_requests(recipe: Recipe, domain: str, num_requests: int) -> list[Prompt]:
    """Return the first of a domain's requests, 0 for all; ValueError if the recipe has no such domain, or fewer."""
    if domain not in recipe.traffic:
        raise ValueError(f'recipe {recipe.name} has no domain "{domain}"; there are: {", ".join(recipe.traffic)}')
    prompts = choose_prompts(domain, recipe.traffic[domain], recipe.seed)["requests"]
    if num_requests > len(prompts):
        raise ValueError(f'recipe {recipe.name} has {len(prompts)} requests of domain "{domain}", got {num_requests}')
    return prompts[: num_requests or None]


@task
def send_traffic(
    client: Client,
    prompts: Sequence[Prompt],
    traffic: Mapping[str, Traffic],
    max_tokens: int,
    concurrency: int,
    on_answer: Callable[[Answer], None] | None = None,
) -> TrafficReport:
    """Send prompts, so many at once, and return how they were answered; `on_answer` is called as each ends."""
    started_s = time.monotonic()
    chats = as_chats(prompts, traffic)
    answers = asyncio.run(client.send(chats, concurrency=concurrency, max_tokens=max_tokens, on_answer=on_answer))
    return summarise(answers, time.monotonic() - started_s)


def summarise(answers: Sequence[Answer], seconds: float) -> TrafficReport:
    """Sum up any number of answers that took so many seconds together."""
    ok = [answer for answer in answers if answer.status == "ok"]
    steps = sum(answer.num_steps for answer in ok)
    accepted = sum(answer.num_accepted for answer in ok)
    return TrafficReport(
        num_requests=len(answers),
        num_ok=len(ok),
        failures=dict(Counter(answer.status for answer in answers if answer.status != "ok")),
        tau=1 + accepted / steps if steps else None,
        tokens_per_s=sum(answer.num_tokens for answer in ok) / max(seconds, 1e-9),
        seconds=seconds,
        draft_versions=dict(Counter(answer.draft_version for answer in ok if answer.draft_version is not None)),
    )
