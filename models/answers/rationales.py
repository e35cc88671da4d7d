"""The target's answers to two tasks: the one that is served, and to say why an answer is what it is.

L = L_first + λ L_second, each of them a mean over the tokens of its answers

In "distilling step-by-step" a large model's rationales are a second task of the small one that learns its answers. Here
the target writes both: the second task is a domain of the traffic, whose prompts ask for the working, such as those of
source `reasoned` with `task = "rationale"`. A draft learns what the target says in either; a token counts so that the
two tasks count as above, however many tokens they have.
"""

from collections.abc import Collection, Sequence
from typing import Literal

from pydantic import Field

from models.core.learning.hidden import Sample
from models.params import BaseParams, did_you_mean

PAPER = "arXiv:2305.02301, section 3.2"
WRITES = LOGGED = False


class Params(BaseParams):
    """Which task is the second, and how it is weighed."""

    name: Literal["rationales"] = "rationales"
    domain: str = Field("rationale", description="of the second task's prompts; all other domains are the first task.")
    weight: float = Field(1.0, ge=0, allow_inf_nan=False, description="λ.")


def weigh(samples: Sequence[Sample], params: Params) -> list[list[float]]:
    """Return the weight of each token of each answer; the mean over all that can be drafted is 1. ValueError if one of
    the two tasks has no answer of two tokens."""
    num_drafted = dict.fromkeys((False, True), 0)
    for sample in samples:
        num_drafted[sample.domain == params.domain] += len(sample.completion_ids) - 1
    if not all(num_drafted.values()):
        raise ValueError(
            f'answers "rationales" are of two tasks; of {len(samples)} answers none of two tokens is '
            f'{"of" if num_drafted[False] else "of another than"} domain "{params.domain}"'
        )
    total = sum(num_drafted.values()) / (1 + params.weight)
    counts = {False: total / num_drafted[False], True: params.weight * total / num_drafted[True]}
    return [[counts[sample.domain == params.domain]] * len(sample.completion_ids) for sample in samples]


def require_domains(params: Params, domains: Collection[str]) -> None:
    """Raise ValueError unless domains that are learnt are of both tasks."""
    if params.domain not in domains:
        raise ValueError(
            f'answers "rationales" learn domain "{params.domain}" as the second task, and no [traffic.{params.domain}] '
            f"with num_train above 0 gives any{did_you_mean(params.domain, domains)}"
        )
    if len(domains) == 1:
        raise ValueError(f'domain "{params.domain}" is the second task, and no other domain is the first')
