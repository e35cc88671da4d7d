"""What a draft's tokens are held to: the word of the target, alone or in a mean with that of other models.

p = Σᵢ wᵢ pᵢ / Σᵢ wᵢ, the target's weight being 1

The mean of several models is often a better label than what any one of them says (Buciluă, Caruana and
Niculescu-Mizil, "Model Compression", KDD 2006; arXiv:1503.02531, section 1). What serving keeps is still up to the
target alone, so the mean pays where it teaches more of the text than it leads away from the target. States are the
target's in any case.

A model's last residual stream is kept instead of its logits, because it is smaller.

Letters: B sequences, T tokens of a sequence, N rows, H a model's hidden width, V its vocabulary, D the draft's.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models import catalog
from models.core.checkpoints.readout import Readout
from models.core.learning.hidden import HiddenStates, Sample
from models.drafts import Draft, Unrolled
from models.losses import Drafted
from models.params import BaseParams
from models.targets import MODEL_TYPES, describe, differing_tokens, target_config
from models.types import Frozen

# Of a batch: a model's last residual streams [B, T, H], and [B, T] log Σ exp of its logits.
Said = tuple[Tensor, Tensor]


class TeacherParams(Frozen):
    """A model beside the target whose word the draft learns too. The target stays the one that is served.

    Attributes:
        model: of the target's tokenizer, and of a layout that drafts are trained for.
        weight: of its probabilities in the mean, in which the target's have weight 1.
    """

    model: Annotated[BaseParams, catalog.Method("targets")]
    weight: float = Field(1.0, ge=0, allow_inf_nan=False)


def probs(readout: Readout, normed: Tensor, log_sums: Tensor) -> Tensor:
    """[N, H] a model's normed states, [N] → [N, D] its probabilities of what is read out, not normalised over D."""
    return (readout.logits(normed) - log_sums[:, None]).exp()


class Teachers:
    """The target and the models beside it, asked for what one loss needs."""

    def __init__(
        self, draft: Draft, target_dir: Path, loss: BaseParams, beside: Sequence[TeacherParams], dirs: Sequence[Path]
    ) -> None:
        """Read the target, and the other models, which lie in `dirs`; the draft is where it learns `loss`."""
        self._loss, self._needs = loss.name, catalog.load("losses", loss.name).NEEDS
        self._dirs, self._states = tuple(dirs), list[HiddenStates]()
        vocabulary = draft.vocabulary
        self._target, *self._beside = (
            Readout.load(directory, vocabulary.device, vocabulary) for directory in (target_dir, *dirs)
        )
        # Each target id's place in the draft's vocabulary, −1 for those that are not in it.
        vocab_size = target_config(target_dir).vocab_size
        self._draft_ids = torch.full((vocab_size,), -1, device=vocabulary.device)
        self._draft_ids[vocabulary] = torch.arange(len(vocabulary), device=vocabulary.device)
        total = 1 + sum(one.weight for one in beside)
        self._shares = [1 / total, *(one.weight / total for one in beside)]

    def read(
        self, states: HiddenStates, device: str, on_progress: Callable[[int, int, float], None] | None = None
    ) -> None:
        """Let the other models read the samples whose target's states these are; finished ones are found again."""
        self._states = []
        for directory in self._dirs:
            card = describe(directory)
            folder = states.directory.with_name(f"teacher-{card.sha256[:16]}")
            told = HiddenStates(folder, states.samples, [card.num_layers], card.hidden_size)
            told.extract(directory, on_progress=on_progress, device=device)
            self._states.append(told)

    def say(self, batch: Sequence[Sample], target: Said) -> list[Said]:
        """Return what each of them says of a batch, the target's word, which is given, first."""
        word, device = [target], target[0].device
        for states in self._states:
            read = [states.read(sample) for sample in batch]
            final, log_sums = pad_sequence([h.float() for h, _ in read], True), pad_sequence([s for _, s in read], True)
            word.append((final.to(device), log_sums.to(device)))
        return word

    def drafted(self, unrolled: Unrolled, came: Tensor, word: Sequence[Said], places: tuple[Tensor, Tensor]) -> Drafted:
        """Put together what the loss needs of rows [n], and no more; ValueError if the draft has not such states.

        `came` [n] are target ids of the tokens that came instead, `word` is of `say`, `places` are [n] sequences and
        [n] tokens of theirs, after which the rows' words are said.
        """
        columns: dict[str, Tensor] = {}
        with torch.no_grad():
            if {"target_probs", "target_hidden"} & set(self._needs):
                columns["target_hidden"] = self._target.norm(word[0][0][places].float())
            if "target_probs" in self._needs:
                columns["target_probs"] = self._mean(columns["target_hidden"], word, places)
            if "token" in self._needs:
                columns["token"] = self._draft_ids[came]
        if "draft_hidden" in self._needs:
            if unrolled.hidden is None:
                raise ValueError(f'loss "{self._loss}" reads draft_hidden, and this draft has none')
            columns["draft_hidden"] = unrolled.hidden
        return Drafted(unrolled.logits, **{name: columns[name] for name in self._needs})

    def _mean(self, normed: Tensor, word: Sequence[Said], places: tuple[Tensor, Tensor]) -> Tensor:
        """Return [n, D] the mean of their probabilities; `normed` [n, H] are the target's states."""
        mean = self._shares[0] * probs(self._target, normed, word[0][1][places])
        for share, teacher, (states, log_sums) in zip(self._shares[1:], self._beside, word[1:], strict=True):
            mean += share * probs(teacher, teacher.norm(states[places].float()), log_sums[places])
        return mean


def require_reader(beside: Sequence[TeacherParams], loss: BaseParams) -> None:
    """Raise ValueError if a loss would not read what models beside the target say."""
    if beside and "target_probs" not in catalog.load("losses", loss.name).NEEDS:
        raise ValueError(
            f'loss "{loss.name}" does not read what teachers say; choose one that reads the target\'s distribution, '
            'such as loss = { name = "forward_kl" }, or leave teachers out'
        )


def require_teachers(draft: Draft, target_dir: Path, beside: Sequence[TeacherParams], dirs: Sequence[Path]) -> None:
    """Raise ValueError unless each model beside the target has a directory, can be read, and says the same tokens."""
    if len(beside) != len(dirs):
        raise ValueError(f"wanted the directory of each of {len(beside)} teachers; got {len(dirs)}")
    last = int(draft.vocabulary[-1])
    for number, directory in enumerate(dirs, start=1):
        card, kind = describe(directory), target_config(directory).model_type
        if kind not in MODEL_TYPES:
            raise ValueError(f"teacher {number}, {card.name}, is a {kind}; wanted one of: {', '.join(MODEL_TYPES)}")
        if other := differing_tokens(directory, target_dir):
            raise ValueError(
                f"teacher {number}, {card.name}, has another vocabulary than the target: {len(other)} tokens differ, "
                f"such as {other[0]!r}"
            )
        if last >= card.vocab_size:
            raise ValueError(
                f"teacher {number}, {card.name}, says {card.vocab_size} tokens, and the draft may say token {last}"
            )
