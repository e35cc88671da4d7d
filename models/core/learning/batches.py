"""What a draft is trained and scored on: answers in batches, with the target's hidden states."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from models.core.learning.captured import Captures
from models.core.learning.hidden import HiddenStates, Sample
from models.drafts import Draft, Rows


def hidden_states(
    draft: Draft,
    target_dir: Path,
    samples: Sequence[Sample],
    work_dir: Path,
    on_progress: Callable[[int, int, float], None] | None = None,
    device: str = "cpu",
    captured: Captures | None = None,
) -> HiddenStates:
    """Extract the states that `draft` reads, and the last layer's for the target's probabilities.

    Drafts that read the same layers find them in one folder of `work_dir`, others in another.
    """
    config = json.loads((target_dir / "config.json").read_text())
    layers = sorted({*draft.taps, config["num_hidden_layers"]})
    folder = work_dir / "hidden" / "-".join(map(str, layers))
    states = HiddenStates(folder, samples, layers, config["hidden_size"])
    states.extract(target_dir, on_progress=on_progress, device=device, captured=captured)
    return states


def pack(
    batch: Sequence[Sample], states: HiddenStates, num_steps: int, draft: Draft
) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Pad a batch for `draft`, on its device: rows, the last layer's states [B, T, H], log sums [B, T], lengths [B].

    A row's first drafted token is `index + 2`; the first one follows the answer's first token, which the target samples
    from the prompt by itself.
    """
    read = [states.read(sample) for sample in batch]
    hidden = torch.nn.utils.rnn.pad_sequence([h.float() for h, _ in read], batch_first=True)
    log_sums = torch.nn.utils.rnn.pad_sequence([s for _, s in read], batch_first=True)
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(s.token_ids) for s in batch], batch_first=True)
    tokens = torch.nn.functional.pad(tokens, (0, num_steps + 1))
    lengths = torch.tensor([len(s.token_ids) for s in batch])
    index = [torch.arange(len(s.prompt_ids) - 1, len(s.token_ids) - 2) for s in batch]
    sequence = [torch.full_like(rows, number) for number, rows in enumerate(index)]
    device = draft.vocabulary.device
    hidden = hidden.to(device)
    width = len(draft.taps) * states.hidden_size
    tokens, sequences, places = (one.to(device) for one in (tokens, torch.cat(sequence), torch.cat(index)))
    rows = Rows(hidden[..., :width], tokens, sequences, places)
    return rows, hidden[..., -states.hidden_size :], log_sums.to(device), lengths.to(device)
