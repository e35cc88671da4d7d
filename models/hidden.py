"""The target's hidden states, computed once per sequence and kept on disk.

Training reads each sequence many times and a forward pass of the target costs more than one of the draft. States are
kept in bfloat16 in one flat file that is read through the page cache, so memory stays bounded whatever the window's
size. Each finished batch adds its lines to the index after its bytes are on disk; an interrupted extraction goes on
after the last such line. A quantized target's states are those of its quantized layers, as transformers simulates them.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.layers.linears import blocks
from models.loading import load_model
from models.precision import fast_dtype


class Sample(NamedTuple):
    """One served answer: what was asked, what the target said, and how it was sampled.

    Attributes:
        cluster: names the conversations that it belongs with (`models.clusters`); "" where nobody looked.
    """

    id: str
    domain: str
    prompt_ids: list[int]
    completion_ids: list[int]
    temperature: float = 0.0
    cluster: str = ""

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt_ids + self.completion_ids


class HiddenStates:
    """States of `samples` at some layers, on disk.

    Attributes:
        layers: residual streams, counted as layers done, ascending; the last one is the target's last.
        tokens_per_s: of the extraction that this object ran; 0 when all was there.
    """

    def __init__(self, directory: Path, samples: Sequence[Sample], layers: Sequence[int], hidden_size: int) -> None:
        self.samples, self.layers, self.hidden_size = samples, tuple(layers), hidden_size
        self.tokens_per_s = 0.0
        self._directory = directory
        self._offsets: dict[str, int] = {}
        self._states: Tensor | None = None
        self._log_sums: Tensor | None = None

    def read(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Return [T, len(layers)·H] states in bfloat16, and [T] log Σ exp of the target's logits after each token."""
        start, length = self._offsets[sample.id], len(sample.token_ids)
        if self._states is None or self._log_sums is None:
            raise ValueError("hidden states were not extracted")
        return self._states[start : start + length], self._log_sums[start : start + length]

    def extract(
        self,
        target_dir: Path,
        batch_tokens: int = 1024,
        on_progress: Callable[[int, int, float], None] | None = None,
        device: str = "cpu",
    ) -> None:
        """Compute what is not on disk yet.

        Args:
            target_dir: the target's directory.
            batch_tokens: tokens of one forward pass; four times as many leave a processor's caches and cost a fifth
                of the speed.
            on_progress: called with (tokens done, tokens in all, tokens/s).
            device: where the target runs.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        done = self._read_index()
        wanted = [s for s in self.samples if s.id not in self._offsets]
        if wanted:
            self._run(target_dir, wanted, done, batch_tokens, on_progress, device)
        num_tokens = sum(len(s.token_ids) for s in self.samples)
        width = len(self.layers) * self.hidden_size
        size = max(done, max((self._offsets[s.id] + len(s.token_ids) for s in self.samples), default=0))
        if num_tokens == 0:
            raise ValueError("there are no samples to extract hidden states of")
        states = np.memmap(self._directory / "states.bin", dtype=np.int16, mode="r+", shape=(size, width))
        self._states = torch.from_numpy(states).view(torch.bfloat16)
        self._log_sums = torch.from_numpy(np.fromfile(self._directory / "log_sums.bin", dtype=np.float32, count=size))

    def _read_index(self) -> int:
        """Load offsets; return how many tokens are complete."""
        index, done = self._directory / "index.jsonl", 0
        if index.is_file():
            for line in index.read_text().splitlines():
                try:
                    row = json.loads(line)
                except ValueError:  # the line that a kill cut short; its bytes are written again
                    break
                self._offsets[row["id"]] = row["start"]
                done = max(done, row["start"] + row["length"])
        return done

    def _run(
        self,
        target_dir: Path,
        wanted: list[Sample],
        done: int,
        batch_tokens: int,
        on_progress: Callable[[int, int, float], None] | None,
        device: str,
    ) -> None:
        model = load_model(target_dir, fast_dtype(device), device)
        taps = _Taps(model, self.layers)
        total, finished, started = sum(len(s.token_ids) for s in wanted), 0, perf_counter()
        rows = [json.dumps({"id": i, "start": s, "length": n}) for i, s, n in self._known()]
        index = self._directory / "index.jsonl"
        index.write_text("".join(row + "\n" for row in rows))
        with (
            (self._directory / "states.bin").open("ab") as states,
            (self._directory / "log_sums.bin").open("ab") as log_sums,
            index.open("a") as lines,
            torch.inference_mode(),
        ):
            states.truncate(done * len(self.layers) * self.hidden_size * 2)
            log_sums.truncate(done * 4)
            for batch in length_buckets(wanted, batch_tokens):
                tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(s.token_ids) for s in batch], batch_first=True)
                # Right padding needs no mask: no token attends to a later one.
                final = model.model(input_ids=tokens.to(device), use_cache=False).last_hidden_state
                tapped = taps.take().to("cpu", torch.bfloat16)
                for row, sample in enumerate(batch):
                    length = len(sample.token_ids)
                    states.write(tapped[row, :length].contiguous().view(torch.int16).numpy().tobytes())
                    sums = torch.zeros(length)
                    first = len(sample.prompt_ids) - 1
                    sums[first:] = model.lm_head(final[row, first:length]).float().logsumexp(-1).cpu()
                    log_sums.write(sums.numpy().tobytes())
                for file in (states, log_sums):
                    file.flush()
                    os.fsync(file.fileno())
                for sample in batch:
                    length = len(sample.token_ids)
                    lines.write(json.dumps({"id": sample.id, "start": done, "length": length}) + "\n")
                    self._offsets[sample.id] = done
                    done, finished = done + length, finished + length
                lines.flush()
                self.tokens_per_s = finished / (perf_counter() - started)
                if on_progress:
                    on_progress(finished, total, self.tokens_per_s)
        taps.remove()

    def _known(self) -> list[tuple[str, int, int]]:
        index = self._directory / "index.jsonl"
        if not index.is_file():
            return []
        rows = []
        for line in index.read_text().splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                break
            rows.append((row["id"], row["start"], row["length"]))
        return rows


class _Taps:
    """Hooks that keep residual streams; the library's own list holds the last one after the norm only."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]) -> None:
        self._kept: dict[int, Tensor] = {}
        self._layers = layers
        self._hooks = []
        for number, layer in enumerate(blocks(model), start=1):
            if number in layers:
                self._hooks.append(layer.register_forward_hook(self._keeper(number)))
        if 0 in layers:
            self._hooks.append(model.model.embed_tokens.register_forward_hook(self._keeper(0)))

    def _keeper(self, number: int) -> Callable[..., None]:
        def keep(module: torch.nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._kept[number] = output[0] if isinstance(output, tuple) else output

        return keep

    def take(self) -> Tensor:
        """[B, T, layers·H]."""
        return torch.cat([self._kept[number] for number in self._layers], dim=-1)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def length_buckets(samples: Sequence[Sample], batch_tokens: int) -> list[list[Sample]]:
    """Group samples of like length so that a padded batch holds at most `batch_tokens` tokens (or one sample)."""
    batches: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: (len(s.token_ids), s.id)):
        length = len(sample.token_ids)
        if batches and (len(batches[-1]) + 1) * length <= batch_tokens:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches
