"""Sequence packing: several documents share a row, each with positions from 0, and none attends to another.

The documents of a step are put into the fullest row that still has place, the longest first, so the loss of a step is
the same as unpacked: the mean over the same tokens. The first token of a document is not learnt, since what is before
it belongs to another one.

transformers finds the documents by positions that start again. Whether a model's attention heeds that is tried when
training starts.
"""

from typing import Literal

import torch
from pydantic import Field
from transformers import PreTrainedModel

from models.core.learning.training import IGNORED
from models.params import BaseParams
from models.regimes import Batch, Regime

PAPER = "arXiv:2107.02027, section 3"
CHANGES = ("batches",)


class Params(BaseParams):
    """How long a row is.

    Attributes:
        row_tokens: tokens of a row; a longer document has a row of its own length, and all others are then as long.
    """

    name: Literal["packing"] = "packing"
    row_tokens: int = Field(256, ge=2)


CORNERS = (Params(row_tokens=2),)


class Hooks(Regime):
    """Refuses a model that attends across the documents of a row."""

    KEPT = ("num_tokens", "num_places")
    params: Params
    num_tokens = num_places = 0

    def start(self, model: PreTrainedModel, num_steps: int) -> None:
        _require_separate(model)

    def batches(self, pieces: list[list[int]], batch_tokens: int) -> list[list[list[int]]] | None:
        rows = _rows(pieces, self.params.row_tokens)
        rows.sort(key=lambda row: sum(map(len, row)))
        length = max(map(sum, ([len(document) for document in row] for row in rows)))
        each = max(1, batch_tokens // length)
        return [
            [document for row in rows[start : start + each] for document in row] for start in range(0, len(rows), each)
        ]

    def collate(self, documents: list[list[int]]) -> Batch | None:
        batch = pack(documents, self.params.row_tokens)
        self.num_tokens += sum(map(len, documents))
        self.num_places += batch.token_ids.numel()
        return batch

    def figures(self) -> dict[str, float]:
        return {"padding_share": 1 - self.num_tokens / max(self.num_places, 1)}


def pack(documents: list[list[int]], row_tokens: int) -> Batch:
    """Return a batch of documents packed into rows of `row_tokens`, unless a document is longer."""
    rows = _rows(documents, row_tokens)
    length = max(sum(map(len, row)) for row in rows)
    token_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    labels, position_ids = torch.full_like(token_ids, IGNORED), torch.zeros_like(token_ids)
    for number, row in enumerate(rows):
        start = 0
        for document in row:
            places = slice(start, start + len(document))
            token_ids[number, places] = labels[number, places] = torch.tensor(document)
            labels[number, start] = IGNORED
            position_ids[number, start:] = torch.arange(length - start)  # padding goes on as the last document
            start += len(document)
    return Batch(token_ids, labels, position_ids)


def _rows(documents: list[list[int]], row_tokens: int) -> list[list[list[int]]]:
    """Put documents into rows, the longest first, each into the fullest row that has room for it."""
    room = max(row_tokens, *map(len, documents))
    rows: list[list[list[int]]] = []
    used: list[int] = []
    for document in sorted(documents, key=len, reverse=True):
        fitting = [number for number, length in enumerate(used) if length + len(document) <= room]
        if fitting:
            fullest = max(fitting, key=used.__getitem__)
            rows[fullest].append(document)
            used[fullest] += len(document)
        else:
            rows.append([document])
            used.append(len(document))
    return rows


@torch.no_grad()
def _require_separate(model: PreTrainedModel) -> None:
    first, second = [1, 2, 3], [2, 1, 2, 3]
    packed = pack([first, second], len(first + second))
    training = model.training
    model.eval()  # so that two passes agree
    assert packed.position_ids is not None
    together = model(
        input_ids=packed.token_ids.to(model.device), position_ids=packed.position_ids.to(model.device), use_cache=False
    ).logits[0, len(second) :]
    alone = model(input_ids=torch.tensor([first], device=model.device), use_cache=False).logits[0]
    model.train(training)
    if not torch.allclose(together.float(), alone.float(), rtol=1e-2, atol=1e-2 * float(alone.float().abs().max())):
        raise ValueError(
            f"{type(model).__name__} with attention {model.config._attn_implementation} attends across packed documents"
        )
