"""Training regimes, each against plain training of the same small model on the same text.

Trained from scratch is a Llama of four layers, 128 wide, on token ids of the target's tokenizer. Its vocabulary is the
text's 2,047 commonest tokens and one for all others, or the output matrix would be nearly all of the model. Documents
go by eight times, because some methods look at epochs. A seed draws documents, weights and the regime's own coins, the
same for all rows. Each row trains at the learning rate that suits it best.

FLOPs and held memory are counted while the model trains, which adds about a tenth to the seconds of every row. FLOPs
of methods that simulate another arithmetic are those of what ran, scaled by the share that the method reports.
`half_as_long` is plain training of half the epochs: what a regime that saves half must beat.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import catalog
from models.core.evaluation.perplexity import score
from models.core.evaluation.spread import Mean, nats_per_token
from models.core.layers.linears import linears
from models.core.learning.counting import Cost, counted
from models.core.learning.training import Trained, pad, train, train_by_name
from models.params import TrainingParams
from tasks.measure import evidence, sweep
from tasks.measure.comparisons import Bench, Row, commonest, in_turn, shuffled, up_to

QUESTION = "What does each training regime save, and what does it cost in loss, against plain training?"
BASELINE = "plain"
COLUMNS = {
    "loss": "held-out, in the method's own arithmetic, nats/token ↓",
    "float_loss": "held-out, the same weights in floats, nats/token ↓",
    "seconds": "training, s ↓",
    "steps": "steps run ↓",
    "skipped_steps": "steps left out",
    "flops_pct": "FLOPs, % of plain ↓",
    "peak_mib": "held for backward, MiB ↓",
    "skipped_layers_pct": "blocks left out, %",
    "zeroes_pct": "zero weights, %",
    "padding_pct": "padding, %",
    "ticket_epoch": "epoch of the ticket",
    "exit_pct": "exit at half depth agrees, % ↑",
    **evidence.COLUMNS,
    **sweep.COLUMNS,
}
LEARNING_RATE = 2e-3  # where sweeps begin
VOCABULARY, LENGTH, NUM_EPOCHS, EPOCH_TOKENS, HELD_OUT_TOKENS = 2048, 128, 8, 4096, 4096


def rows(budget: float) -> list[Row]:
    """Return plain training, every method, and the further settings that methods name; `budget` scales the text."""
    methods = {}
    for name in catalog.names("regimes"):
        module = catalog.load("regimes", name)
        methods[name] = module.Params()
        methods |= {f"{name}_{heading}": params for heading, params in getattr(module, "COMPARED", {}).items()}
    return [
        _row(BASELINE, None),
        _row("half_as_long", None, NUM_EPOCHS // 2),
        *(_row(heading, params.model_dump(mode="json")) for heading, params in methods.items()),
    ]


def tune(bench: Bench, row: Row, seed: int) -> float:
    return _train(bench, row, seed)[-1]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    model, cost, trained, documents, held_out, loss = _train(bench, row, seed)
    plain_model = _scratch(model.config.vocab_size, seed, bench.device)
    with counted(plain_model) as plain_epoch:
        train(plain_model, documents, _settings(row, num_epochs=1), seed=seed)
    weights = [layer.weight for _, layer in linears(model)]
    return {
        "loss": loss,
        "float_loss": nats_per_token(score(model, held_out, LENGTH)),
        "seconds": trained.seconds,
        "steps": float(trained.num_steps),
        "skipped_steps": float(trained.num_skipped),
        "flops_pct": 100 * (cost.flops * trained.figures.get("flops_share", 1.0)) / (NUM_EPOCHS * plain_epoch.flops),
        "peak_mib": cost.peak_activation_bytes / 2**20,
        "skipped_layers_pct": 100 * trained.figures.get("skipped_layer_share", 0.0),
        "zeroes_pct": 100 * sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights),
        "padding_pct": 100 * trained.figures.get("padding_share", math.nan),
        "ticket_epoch": trained.figures.get("ticket_epoch", math.nan),
        "exit_pct": 100 * _exit_agreement(model, held_out),
        **evidence.evidence(trained),
        "rate": sweep.rate_of(row),
    }


def _row(name: str, method: dict[str, Any] | None, num_epochs: int = NUM_EPOCHS) -> Row:
    return Row(name, {"method": method, "num_epochs": num_epochs, "learning_rate": LEARNING_RATE})


def _train(
    bench: Bench, row: Row, seed: int
) -> tuple[PreTrainedModel, Cost, Trained, list[list[int]], list[list[int]], Mean]:
    """Return a trained model, what it took, its documents, those that are held out, and its own loss on these."""
    # The small model's ids: 0 is left for all other tokens.
    ids = {token: number for number, token in enumerate(commonest(bench.train, VOCABULARY - 1), start=1)}
    documents = _draw(bench.train, ids, max(2 * LENGTH, round(EPOCH_TOKENS * bench.budget)), seed)
    held_out = _draw(bench.held_out, ids, HELD_OUT_TOKENS, seed)
    method = row.settings["method"]
    methods = [] if method is None else [catalog.parse("regimes", method)]
    model = _scratch(len(set(ids.values())) + 1, seed, bench.device)
    with counted(model) as cost:
        trained = train_by_name(model, documents, _settings(row, row.settings["num_epochs"]), methods, seed)
    return model, cost, trained, documents, held_out, evidence.own_loss(model, held_out, methods, LENGTH, seed)


def _settings(row: Row, num_epochs: int) -> TrainingParams:
    return TrainingParams(
        num_epochs=num_epochs, batch_tokens=512, max_length=LENGTH, learning_rate=row.settings["learning_rate"]
    )


def _scratch(vocab_size: int, seed: int, device: str) -> PreTrainedModel:
    sizes = {"intermediate_size": 352, "max_position_embeddings": LENGTH}
    return evidence.small_llama(vocab_size, 128, 4, (4, 2), seed, device, **sizes)


def _draw(domains: dict[str, list[list[int]]], ids: dict[int, int], num_tokens: int, seed: int) -> list[list[int]]:
    rng = torch.Generator().manual_seed(seed)
    documents = in_turn(shuffled(documents, rng) for documents in domains.values())
    pieces = ([ids.get(token, 0) for token in document[:LENGTH]] for document in documents if len(document) > 1)
    return up_to(pieces, num_tokens)


@torch.no_grad()
def _exit_agreement(model: PreTrainedModel, documents: list[list[int]]) -> float:
    """Return the share of places at which the exit after half of the blocks says what the last layer does."""
    agreed = num_places = 0
    for document in documents:
        output = model(input_ids=pad([document]).token_ids.to(model.device), output_hidden_states=True, use_cache=False)
        states: Tensor = output.hidden_states[model.config.num_hidden_layers // 2]
        early = model.lm_head(model.model.norm(states)).argmax(-1)
        agreed += int((early == output.logits.argmax(-1)).sum())
        num_places += len(document)
    return agreed / num_places
