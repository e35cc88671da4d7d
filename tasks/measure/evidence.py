"""The columns that tables of training regimes share: what methods say of themselves, loss in their own arithmetic."""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from models import catalog
from models.evaluation.perplexity import score
from models.learning.training import Trained
from models.params import BaseParams
from tasks.measure.losses import nats_per_token
from tasks.measure.spread import Mean

COLUMNS = {
    "sign_agreement": "signs as the exact product's, share ↑",
    "predicted_share": "signs predicted, share",
    "kept_l1": "gradient's L1 kept, share ↑",
    "clipped_share": "clipped, share ↓",
    "flushed_share": "gradients flushed to zero, share ↓",
    "fit_distance": "distance from the lognormal fit ↓",
}


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
    """Return nats a token of a finished model that computes as it would in use, which may not be as a plain one.

    Args:
        model: as training left it.
        documents: held-out token ids.
        methods: the regimes that it was trained with.
        max_length: longer documents are cut.
        seed: of a method that rounds stochastically.
    """
    with ExitStack() as stack:
        for params in methods:
            module = catalog.load("regimes", params.name)
            if hasattr(module, "regime"):
                regime = module.regime(params, torch.Generator().manual_seed(seed))
                stack.enter_context(regime.answering(model))
        # One document at a time where numbers are rounded: rows of a batch would share scales.
        return nats_per_token(score(model, documents, max_length=max_length, batch_size=1 if methods else 16))
