"""How like its target a changed model still is: what a draft of the target feels, and what perplexity hides.

A smaller, pruned or rounded target may say text as well as before and yet in other words. Kullback-Leibler divergence
and agreement look at each next token of held-out text; τ asks a draft as it is, made for the target, what of the
changed model's own answers it would have guessed.
"""

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.core.evaluation.paired import Score
from models.core.evaluation.scoring import STANDARD, greedy_scores
from models.core.learning.answering import NO_STOPS, Ask, go_on
from models.core.learning.hidden import HiddenStates, Sample
from models.core.learning.training import IGNORED, pad
from models.drafts import Draft


class Likeness(NamedTuple):
    """Of a model to its target, a mean over next tokens of a document.

    `kl` is Σ p log (p / q) in nats, p the target's distribution, q the changed model's; `agreement` the share of places
    at which both find the same token likeliest.
    """

    kl: float
    agreement: float
    num_tokens: int


@torch.no_grad()
def likeness(
    model: PreTrainedModel, target: PreTrainedModel, documents: Sequence[Sequence[int]], batch_size: int = 4
) -> list[Likeness]:
    """Compare a changed model with its target on each document of two tokens or more; ValueError if there is none."""
    if model.config.vocab_size != target.config.vocab_size:
        raise ValueError(f"model has {model.config.vocab_size} tokens, its target {target.config.vocab_size}")
    long_enough = [place for place, document in enumerate(documents) if len(document) > 1]
    if not long_enough:
        raise ValueError(f"none of {len(documents)} documents has two tokens")
    model.eval(), target.eval()
    found: dict[int, Likeness] = {}
    by_length = sorted(long_enough, key=lambda place: len(documents[place]))
    for start in range(0, len(by_length), batch_size):
        chosen = by_length[start : start + batch_size]
        batch = pad([documents[place] for place in chosen])
        logs = (_log_probs(one, batch.token_ids) for one in (target, model))
        for place, told, p, q in zip(chosen, batch.labels[:, 1:] != IGNORED, *logs, strict=True):
            divergence = float((p[told].exp() * (p - q)[told]).sum(dtype=torch.float64))
            agreed = int((p[told].argmax(-1) == q[told].argmax(-1)).sum())
            num_tokens = int(told.sum())
            found[place] = Likeness(max(0.0, divergence / num_tokens), agreed / num_tokens, num_tokens)
    return [found[place] for place in long_enough]


def _log_probs(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=token_ids.to(model.device), use_cache=False).logits[:, :-1]
    return logits.float().log_softmax(-1).cpu()


def fits(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether a draft of `target` can read `model`: depth, width and vocabulary are the same."""
    shape = attrgetter("num_hidden_layers", "hidden_size", "vocab_size")
    return bool(shape(model.config) == shape(target.config))


@torch.inference_mode()
def accepted(
    draft: Draft,
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    num_draft_tokens: int,
    num_tokens: int,
    work_dir: Path,
) -> list[Score]:
    """Return how a draft, as it is, does on each of a model's own greedy answers; τ is 1 + accepted / steps.

    Answers go on past their end, and the draft is moved to where the model is, which it can read, see `fits`. The
    model's hidden states are kept in an empty folder. ValueError if prompts differ in length, which nothing pads, or
    there are none.
    """
    if len({len(prompt) for prompt in prompts}) != 1:
        raise ValueError(f"prompts must be of one length; got {sorted({len(prompt) for prompt in prompts})}")
    said = go_on(model, [Ask(prompt, num_tokens) for prompt in prompts], NO_STOPS, torch.Generator(model.device))
    samples = [
        Sample(f"{place:04d}", "text", list(prompt), answer)
        for place, (prompt, answer) in enumerate(zip(prompts, said, strict=True))
    ]
    layers = sorted({*draft.taps, model.config.num_hidden_layers})
    states = HiddenStates(work_dir, samples, layers, model.config.hidden_size)
    states.extract(model, device=str(model.device))
    draft.to(model.device)
    scores = greedy_scores(draft, states, samples, num_draft_tokens, STANDARD.greedy)
    return [scores[sample.id] for sample in samples]
