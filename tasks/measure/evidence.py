"""What tables of training regimes share: what methods say of themselves, loss in their arithmetic, a small model."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from models import catalog
from models.core.checkpoints.loading import moved
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import Mean, nats_per_token
from models.core.learning.training import Trained
from models.params import BaseParams

COLUMNS = {
    "sign_agreement": "signs as the exact product's, share ↑",
    "predicted_share": "signs predicted, share",
    "kept_l1": "gradient's L1 kept, share ↑",
    "clipped_share": "clipped, share ↓",
    "flushed_share": "gradients flushed to zero, share ↓",
    "fit_distance": "distance from the lognormal fit ↓",
}


def small_llama(
    vocab_size: int, width: int, num_layers: int, heads: tuple[int, int], seed: int, device: str, **more: Any
) -> PreTrainedModel:
    """Return a Llama with weights of the seed's, its embedding tied; `heads` are those of attention, and of keys."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=num_layers,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        tie_word_embeddings=True,
        **more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return moved(LlamaForCausalLM(config).float(), device)


def evidence(trained: Trained) -> dict[str, float]:
    """Return `COLUMNS`; NaN for what the method says nothing of."""
    return {figure: trained.figures.get(figure, math.nan) for figure in COLUMNS}


def own_loss(
    model: PreTrainedModel,
    documents: Sequence[Sequence[int]],
    methods: Sequence[BaseParams],
    max_length: int,
    seed: int = 0,
) -> Mean:
    """Return nats a token of a model that computes as these methods left it to, which may not be as a plain one.

    One of them may round stochastically. Longer documents are cut.
    """
    with ExitStack() as stack:
        for params in methods:
            module = catalog.load("regimes", params.name)
            if hasattr(module, "Hooks"):
                regime = module.Hooks(params, torch.Generator().manual_seed(seed))
                stack.enter_context(regime.answering(model))
        # One document at a time where numbers are rounded: rows of a batch would share scales.
        return nats_per_token(score(model, documents, max_length=max_length, batch_size=1 if methods else 16))
