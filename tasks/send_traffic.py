"""Send a recipe's prompts to a running service and sum up what became of them.

A home remembers which prompts were answered, by the sha256 of each: of one that is sent again look-up would copy the
earlier answer, and its acceptance would tell nothing of the draft.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from infra.client import Answer, Client
from models.recipe import Recipe, Traffic
from models.sources import Prompt
from models.types import Frozen
from tasks.select_data import as_chats, choose_more
from tasks.stages import task

SENT = "sent-prompts.txt"


class TrafficReport(Frozen):
    """A set of requests: how many were answered to the end, and status to number of the others.

    Attributes:
        tau: 1 + accepted / steps over all requests, None if nothing was verified.
        looked_up: of these accepted / steps, those that the draft model did not draft.
        draft_versions: version to the number of requests that it drafted for.
    """

    num_requests: int
    num_ok: int
    failures: dict[str, int]
    tau: float | None
    looked_up: float
    tokens_per_s: float
    seconds: float
    draft_versions: dict[str, int]

    def taus(self) -> str:
        """Return τ in words, and what of it is the draft model's."""
        if self.tau is None:
            return "τ none"
        head = max(0.0, self.tau - 1 - self.looked_up)  # which rounding may have made negative
        return f"τ {self.tau:.3f}: 1 + {head:.3f} by the draft + {self.looked_up:.3f} by look-up, tokens a step"


def sent_before(home: Path) -> set[str]:
    """Return the ids of the prompts that `send_traffic` was answered."""
    file = home / SENT
    return set(file.read_text().split()) if file.is_file() else set()


def choose_requests(recipe: Recipe, domain: str, num_requests: int, sent: Collection[str]) -> list[Prompt]:
    """Return requests of a domain that are not among those sent: so many, or for 0 as many as the recipe has.

    They are the recipe's own first, then others of the same groups. ValueError if the recipe has no such domain, or
    fewer are left; for 0, if none is.
    """
    if domain not in recipe.traffic:
        raise ValueError(f'recipe {recipe.name} has no domain "{domain}"; there are: {", ".join(recipe.traffic)}')
    table = recipe.traffic[domain]
    fresh = [prompt for prompt in choose_more(domain, table, recipe.seed, "requests") if prompt.id not in sent]
    if len(fresh) < max(num_requests, 1):
        which, otherwise = (" that were not sent before", "; --repeat sends the others again") if sent else ("", "")
        has = f'recipe {recipe.name} has {len(fresh)} requests of domain "{domain}"{which}'
        raise ValueError(f"{has}, wanted {num_requests or table.num_requests}{otherwise}")
    return fresh[: num_requests or table.num_requests]


@task
def send_traffic(
    client: Client,
    prompts: Sequence[Prompt],
    traffic: Mapping[str, Traffic],
    max_tokens: int,
    concurrency: int,
    home: Path,
    on_answer: Callable[[Answer], None],
) -> TrafficReport:
    """Send prompts, so many at once, and return how they were answered; `on_answer` is called as each ends.

    The home remembers those that were answered.
    """
    started_s = time.monotonic()
    chats = as_chats(prompts, traffic)
    with (home / SENT).open("a") as sent:

        def tell(answer: Answer) -> None:
            if answer.status == "ok":
                sent.write(f"{answer.prompt_id}\n")
            on_answer(answer)

        answers = asyncio.run(client.send(chats, concurrency=concurrency, max_tokens=max_tokens, on_answer=tell))
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
        looked_up=sum(answer.num_looked_up for answer in ok) / max(steps, 1),
        tokens_per_s=sum(answer.num_tokens for answer in ok) / max(seconds, 1e-9),
        seconds=seconds,
        draft_versions=dict(Counter(answer.draft_version for answer in ok if answer.draft_version is not None)),
    )
