"""What a draft is trained and scored on: answers in batches, with the target's hidden states.

States are computed once per sequence: training reads each many times, and a forward pass of the target costs more than
one of the draft. They are bfloat16 in one flat file that is read through the page cache, so memory stays bounded
whatever the window's size. Each finished batch adds its lines to the index after its bytes are on disk; an interrupted
extraction goes on after the last such line. A quantized target's states are those of its quantized layers, as
transformers simulates them.

What was captured while an answer was served (models/core/learning/captured.py) is taken as it is: the target reads only
the positions before it, those of equal beginnings once. It may differ in the last bits, since an engine computes in
another order.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from models.core.checkpoints.loading import load_model
from models.core.checkpoints.readout import Readout, decoder_layers
from models.core.layers.kernels import fast_dtype
from models.core.learning.captured import Captured, Captures
from models.drafts import Draft, Rows
from models.targets import target_config
from models.types import MIN_COMPLETION

# Of one forward pass; four times as many leave a processor's caches and cost a fifth of the speed.
BATCH_TOKENS = 1024
FOLDER = "hidden"  # of a run's work directory
USUAL = 0.99  # of texts are learnt to their ends, unless memory does not suffice
ItemT = TypeVar("ItemT")


class Sample(NamedTuple):
    """One served answer: what was asked, what the target said, and how it was sampled.

    Attributes:
        cluster: names the conversations that it belongs with (`models.core.evaluation.clusters`); "" where nobody
        looked. weight: requests that it stands for beside the others of its domain where drafts are held to it.
        rejected: places of the completion at which a drafted token was rejected, 0 being its first token; None where
            nothing is known of drafts.
    """

    id: str
    domain: str
    prompt_ids: list[int]
    completion_ids: list[int]
    temperature: float = 0.0
    cluster: str = ""
    weight: float = 1.0
    rejected: list[int] | None = None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt_ids + self.completion_ids


def usual_length(samples: Sequence[Sample], batch_tokens: int) -> int:
    """Return the tokens that 99 samples in 100 have at most, or those of a batch, whichever are more.

    A batch holds one sample at least: a text far longer than the others would take memory that none of them takes. It
    is none of the 99, however few samples there are.
    """
    lengths = sorted(len(sample.token_ids) for sample in samples)
    return max([batch_tokens, *lengths[int(USUAL * len(lengths)) - 1 :][:1]])


def cut_ends(samples: Sequence[Sample], max_length: int) -> list[Sample]:
    """Leave out what is behind so many tokens, and samples of whose answers nothing could be learnt then."""
    kept = []
    for sample in samples:
        room = max_length - len(sample.prompt_ids)
        if room < len(sample.completion_ids):
            rejected = None if sample.rejected is None else [place for place in sample.rejected if place < room]
            sample = sample._replace(completion_ids=sample.completion_ids[: max(0, room)], rejected=rejected)
        if room >= MIN_COMPLETION:
            kept.append(sample)
    return kept


class HiddenStates:
    """States of `samples` at some layers, on disk.

    Attributes:
        layers: residual streams, counted as layers done, ascending; the last one is the target's last.
        directory: where they lie.
        tokens_per_s: of the extraction that this object ran; 0 when all was there.
    """

    def __init__(self, directory: Path, samples: Sequence[Sample], layers: Sequence[int], hidden_size: int) -> None:
        self.samples, self.layers, self.hidden_size = samples, tuple(layers), hidden_size
        self.tokens_per_s = 0.0
        self.directory = directory
        self._offsets: dict[str, int] = {}
        self._states = self._log_sums = torch.empty(0)

    def read(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return [T, len(layers)·H] states in bfloat16, and [T] log Σ exp of the target's logits after each token."""
        start = self._offsets[sample.id]
        places = slice(start, start + len(sample.token_ids))
        return self._states[places], self._log_sums[places]

    def extract(
        self,
        target: Path | PreTrainedModel,
        on_progress: Callable[[int, int, float], None] | None = None,
        device: str = "cpu",
        captured: Captures | None = None,
    ) -> None:
        """Compute what is neither on disk yet nor captured.

        `target` is its directory, or the model itself where it lies in none; `on_progress` is called with tokens done,
        tokens in all and tokens/s.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        rows = self._read_index()
        self._offsets = {row["id"]: row["start"] for row in rows}
        size = max((row["start"] + row["length"] for row in rows), default=0)
        if wanted := [s for s in self.samples if s.id not in self._offsets]:
            model = load_model(target, fast_dtype(device), device) if isinstance(target, Path) else target
            size = self._run(_Target(model, self.layers, device), wanted, rows, size, on_progress, captured)
        if not size:
            raise ValueError("there are no samples to extract hidden states of")
        shape = size, len(self.layers) * self.hidden_size
        states = np.memmap(self.directory / "states.bin", dtype=np.int16, mode="r+", shape=shape)
        self._states = torch.from_numpy(states).view(torch.bfloat16)
        self._log_sums = torch.from_numpy(np.fromfile(self.directory / "log_sums.bin", dtype=np.float32, count=size))

    def _read_index(self) -> list[dict[str, Any]]:
        """Return what the index says of samples that are complete."""
        index, rows = self.directory / "index.jsonl", []
        for line in index.read_text().splitlines() if index.is_file() else ():
            try:
                rows.append(json.loads(line))
            except ValueError:  # the line that a kill cut short; its bytes are written again
                break
        return rows

    def _run(
        self,
        target: "_Target",
        wanted: list[Sample],
        rows: list[dict[str, Any]],
        done: int,
        on_progress: Callable[[int, int, float], None] | None,
        captured: Captures | None,
    ) -> int:
        """Compute what is wanted behind the first `done` tokens; return how many there are then."""
        total, finished, started = sum(len(s.token_ids) for s in wanted), 0, perf_counter()
        index = self.directory / "index.jsonl"
        index.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with (
            (self.directory / "states.bin").open("ab") as states,
            (self.directory / "log_sums.bin").open("ab") as log_sums,
            index.open("a") as lines,
            torch.inference_mode(),
        ):
            states.truncate(done * len(self.layers) * self.hidden_size * 2)
            log_sums.truncate(done * 4)
            for batch in self._batches(target, wanted, captured):
                for _, tapped, sums in batch:
                    states.write(tapped.contiguous().view(torch.int16).numpy().tobytes())
                    log_sums.write(sums.numpy().tobytes())
                for file in (states, log_sums):
                    file.flush()
                    os.fsync(file.fileno())
                for sample, tapped, _ in batch:
                    length = len(tapped)
                    lines.write(json.dumps({"id": sample.id, "start": done, "length": length}) + "\n")
                    self._offsets[sample.id] = done
                    done, finished = done + length, finished + length
                lines.flush()
                self.tokens_per_s = finished / (perf_counter() - started)
                if on_progress:
                    on_progress(finished, total, self.tokens_per_s)
        target.close()
        return done

    def _batches(
        self, target: "_Target", wanted: list[Sample], captured: Captures | None
    ) -> Iterator[list[tuple[Sample, Tensor, Tensor]]]:
        """Yield samples with [T, W] states in bfloat16 and [T] log sums, those that were captured first."""
        rest = wanted
        if captured is not None:
            rest = []
            for batch in length_buckets(wanted, BATCH_TOKENS):
                found = [(sample, captured.find(sample.id, sample.token_ids, self.layers)) for sample in batch]
                rest += [sample for sample, one in found if one is None]
                if made := [(sample, *target.complete(sample, one)) for sample, one in found if one is not None]:
                    yield made
        for batch in length_buckets(rest, BATCH_TOKENS):
            yield target.compute(batch)


class _Target:
    """The target at work: states at some layers, and what its logits sum up to after each token of an answer."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int], device: str) -> None:
        self._decoder, self._readout, self._width = model.get_decoder(), Readout(model), model.config.hidden_size
        self._dtype, self._device, self._layers = model.dtype, device, layers
        self._beginnings: dict[tuple[int, ...], Tensor] = {}
        self._kept: dict[int, Tensor] = {}  # residual streams; the library's own list has the last one normed only
        blocks = decoder_layers(model)
        self._hooks = [blocks[layer - 1].register_forward_hook(partial(self._keep, layer)) for layer in layers if layer]
        if 0 in layers:  # what the first one reads: some families scale or add to what the embedding puts out
            self._hooks.append(blocks[0].register_forward_pre_hook(self._keep_read, with_kwargs=True))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, layer: int, module: object, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._kept[layer] = output[0] if isinstance(output, tuple) else output

    def _keep_read(self, module: object, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        self._kept[0] = inputs[0] if inputs else named["hidden_states"]

    def compute(self, batch: Sequence[Sample]) -> list[tuple[Sample, Tensor, Tensor]]:
        """Run whole samples."""
        tapped, final = self._read([sample.token_ids for sample in batch])
        return [
            (sample, tapped[row, : len(sample.token_ids)], self._log_sums(sample, final[row]))
            for row, sample in enumerate(batch)
        ]

    def complete(self, sample: Sample, captured: Captured) -> tuple[Tensor, Tensor]:
        """Run what is missing before captured states; the last token's are never read and are zeroes."""
        states = torch.zeros(len(sample.token_ids), captured.states.shape[1], dtype=torch.bfloat16)
        states[captured.first : -1] = captured.states
        if captured.first:
            beginning = tuple(sample.token_ids[: captured.first])
            if beginning not in self._beginnings:
                self._beginnings[beginning] = self._read([list(beginning)])[0][0]
            states[: captured.first] = self._beginnings[beginning]
        last = states[:, -self._width :].to(self._device, self._dtype)
        return states, self._log_sums(sample, self._readout.norm(last))

    def _read(self, token_ids: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """[B, T] → [B, T, W] states in bfloat16 and [B, T, H] what the output matrix multiplies."""
        tokens = pad_sequence([torch.tensor(ids) for ids in token_ids], batch_first=True)
        # Right padding needs no mask: no token attends to a later one.
        final = self._decoder(input_ids=tokens.to(self._device), use_cache=False).last_hidden_state
        return torch.cat([self._kept[layer] for layer in self._layers], dim=-1).to("cpu", torch.bfloat16), final

    def _log_sums(self, sample: Sample, final: Tensor) -> Tensor:
        length, first = len(sample.token_ids), len(sample.prompt_ids) - 1
        sums = torch.zeros(length)
        sums[first:] = self._readout.logits(final[first:length]).float().logsumexp(-1).cpu()
        return sums


def batches_of(items: Iterable[ItemT], length: Callable[[ItemT], int], batch_tokens: int) -> list[list[ItemT]]:
    """Group items of like length, so that little is padded; what is longer than a batch is one by itself."""
    batches: list[list[ItemT]] = []
    for item in sorted(items, key=length):
        # Sorted, so the new item would be the longest of its batch.
        if batches and length(item) * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def length_buckets(samples: Sequence[Sample], batch_tokens: int) -> list[list[Sample]]:
    """Group samples of like length so that a padded batch holds at most `batch_tokens` tokens (or one sample)."""
    return batches_of(sorted(samples, key=lambda sample: sample.id), lambda sample: len(sample.token_ids), batch_tokens)


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
    config = target_config(target_dir)
    layers = sorted({*draft.taps, config.num_hidden_layers})
    folder = work_dir / FOLDER / "-".join(map(str, layers))
    states = HiddenStates(folder, samples, layers, config.hidden_size)
    states.extract(target_dir, on_progress=on_progress, device=device, captured=captured)
    return states


def pack(
    batch: Sequence[Sample], states: HiddenStates, num_steps: int, draft: Draft
) -> tuple[Rows, Tensor, Tensor, Tensor]:
    """Pad a batch for `draft`, on its device: rows, the last layer's states [B, T, H], log sums [B, T], lengths [B].

    A row's first drafted token is `index + 2`; the first one follows the answer's first token, which the target samples
    from the prompt by itself.
    """
    read, device = [states.read(sample) for sample in batch], draft.vocabulary.device
    hidden = pad_sequence([h.float() for h, _ in read], batch_first=True).to(device)
    log_sums = pad_sequence([s for _, s in read], batch_first=True)
    tokens = pad(pad_sequence([torch.tensor(s.token_ids) for s in batch], batch_first=True), (0, num_steps + 1))
    lengths = torch.tensor([len(s.token_ids) for s in batch])
    index = [torch.arange(len(s.prompt_ids) - 1, len(s.token_ids) - 2) for s in batch]
    sequence = [torch.full_like(rows, number) for number, rows in enumerate(index)]
    tapped = hidden[..., : len(draft.taps) * states.hidden_size]
    rows = Rows(tapped, tokens.to(device), torch.cat(sequence).to(device), torch.cat(index).to(device))
    return rows, hidden[..., -states.hidden_size :], log_sums.to(device), lengths.to(device)
