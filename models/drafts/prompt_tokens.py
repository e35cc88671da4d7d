"""Parallel prompt decoding: learnt vectors behind a token let the target itself say what comes after the next one.

    x₁ … xₙ, e₁, …, e_K  →  target  →  p(xₙ₊₁), q₁(xₙ₊₂), …, q_K(xₙ₊₁₊ₖ)

The e are read in place of embeddings; they are all that is learnt, K vectors of the target's width. With an ensemble
there are several chains of them, of which none sees another, and their logits are averaged. They start as embeddings of
the commonest tokens.

A step's guesses come out of the step before: its pass reads vectors behind each token that it verifies, because any of
them may be the last that is accepted, and only those of this one are used. Which rows get vectors follows the paper's
pruning, from the draft's own word instead of counts: a row's i-th vector counts as much as the row is likely to be the
last that is accepted, times how likely i guesses in a row are right, and the best `num_vectors` are read, at least one
behind each row. Where nothing was asked in the step before, in a request's first step and after a swap, a pass of the
draft's own reads K rows.

Trained on the target's distributions, 0.8ᵏ for place k, at places that are drawn anew each time: each is K rows through
the whole target, forth and back.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from models.core.checkpoints.loading import load_floats, moved, read_tensor
from models.core.drafting import draft_format
from models.core.drafting.draft_format import read_params, require_llama_layout
from models.core.drafting.drafters import Beside, draft_chain, step_by_step
from models.core.drafting.proposal import Proposal
from models.core.drafting.self_draft import Drafter, TargetRunner
from models.core.layers.decoder import Decoder
from models.drafts import Draw, GoOn, KeepRows, Procedure, Rows, Unrolled, confidence
from models.losses import forward_kl
from models.params import BaseParams
from models.targets import TargetCard, describe, target_config
from models.trees import path_to

PAPER = "arXiv:2405.18628"
FAMILY = "prompt_tokens"
ARCHITECTURES = ("PromptTokens",)
SERVED = False
TOGETHER = 64  # places that are read in one pass where a text is unrolled


class Params(BaseParams):
    """How many vectors there are, and how many are read.

    Attributes:
        num_prompts: K, the most tokens that are drafted one after the other.
        ensemble: chains of vectors whose logits are averaged.
        num_vectors: the most that a pass of the target reads beside the tokens, but at least one chain behind each.
        share: of a text's places, those that a training step learns from.
    """

    name: Literal["prompt_tokens"] = "prompt_tokens"
    num_prompts: int = Field(3, ge=1)
    ensemble: int = Field(1, ge=1)
    num_vectors: int = Field(12, ge=1)
    share: float = Field(0.25, gt=0, le=1)


class PromptTokens(TargetRunner):
    """The vectors [ensemble, K, H]; all else is the target's."""

    procedure = Procedure(loss=forward_kl.Params(), follow="all", step_decay=0.8)
    expands = True

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.params, self.config = (params := Params(**config[FAMILY])), config
        self.vectors = nn.Parameter(torch.empty(params.ensemble, params.num_prompts, config["hidden_size"]))
        self._models: dict[str, PreTrainedModel] = {}  # by device

    @property
    def max_depth(self) -> int:  # type: ignore[override]  # a number that the class does not know
        return self.params.num_prompts

    @property
    def vocabulary(self) -> Tensor:
        return torch.arange(self.config["vocab_size"], device=self.vectors.device)

    def num_unrolled(self, num_draft_tokens: int) -> int:
        """Return K: a tree may have more nodes than that, so how many are served does not tell which vectors are."""
        return self.max_depth

    def num_vectors(self, num_tokens: int) -> int:
        """See `models.drafts.Draft`; a step that drafts nothing reads none."""
        counts = self.allot([1.0] * (num_tokens + 1), [1.0] * self.max_depth) if num_tokens else []
        return sum(counts) * self.params.ensemble

    def allot(self, last: Sequence[float], right: Sequence[float]) -> list[int]:
        """Choose how many vectors of a chain are read behind each row. `last` is how likely each row is the last that
        is accepted, `right` [K] how likely so many guesses hold."""
        counts = [1] * len(last)
        more = [(row, place) for row in range(len(last)) for place in range(1, len(right))]
        more.sort(key=lambda one: -last[one[0]] * right[one[1]])
        for row, _ in more[: max(self.params.num_vectors // self.params.ensemble - len(last), 0)]:
            counts[row] += 1
        return counts

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        """See `models.drafts.Draft`; with `rows.rng`, in training, of a share of the rows."""
        running = torch.arange(len(rows.index), device=rows.index.device)
        if rows.rng is not None:
            num_kept = max(1, round(self.params.share * len(running)))
            drawn = torch.randperm(len(running), generator=rows.rng, device=running.device)[:num_kept]
            running = drawn.sort().values
        model = self._model()
        states = torch.zeros(len(rows.index), self.max_depth, self.config["hidden_size"], device=running.device)
        for sequence in rows.sequence[running].unique().tolist():
            here = running[rows.sequence[running] == sequence]
            states = states.index_put((here,), self._read(model, rows.token_ids[sequence], rows.index[here]))

        def say(step: int, running: Tensor) -> tuple[Tensor, Tensor]:
            hidden = states[running, step]
            return hidden, model.lm_head(hidden)

        return step_by_step(running, min(num_steps, self.max_depth), keep, say)

    def drafter(self, max_len: int) -> "_Drafter":
        return _Drafter(self, max_len)

    def _model(self) -> PreTrainedModel:
        """Return a copy of the target that gradients go through."""
        device = str(self.vectors.device)
        if device not in self._models:
            with torch.inference_mode(False):
                self._models = {device: moved(load_floats(self.target_dir), device).requires_grad_(False)}
        return self._models[device]

    def _read(self, model: PreTrainedModel, token_ids: Tensor, index: Tensor) -> Tensor:
        """Read the vectors behind places [n] of a text [T]: [n, K, H] last states, normed, means over the ensemble."""
        stop, device = int(index.max()) + 1, index.device
        with torch.no_grad():
            cache = model.model(input_ids=token_ids[None, :stop], use_cache=True).past_key_values
        size = self.params.ensemble * self.max_depth
        places = torch.arange(self.max_depth, device=device).repeat(self.params.ensemble)
        chains = torch.arange(self.params.ensemble, device=device).repeat_interleave(self.max_depth)
        above = (chains[:, None] == chains) & (places[:, None] >= places)
        found = []
        for at in index.split(TOGETHER):
            own = torch.block_diag(*[above] * len(at)).bool()
            text = (torch.arange(stop, device=device) <= at[:, None]).repeat_interleave(size, 0)
            seen = torch.cat([text, own], 1)
            mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
            states = model.model(
                inputs_embeds=self.vectors.flatten(0, 1).repeat(len(at), 1)[None],
                attention_mask=mask[None, None],
                position_ids=(at[:, None] + 1 + places).flatten()[None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            cache.crop(-len(own))  # which it has grown by
            found.append(states[0].unflatten(0, (len(at), self.params.ensemble, self.max_depth)).mean(1))
        return torch.cat(found)


class _Drafter(Drafter):
    """See `models.drafts.Drafter`, `Expander` and `Asker`."""

    draft: PromptTokens

    def __init__(self, draft: PromptTokens, max_len: int) -> None:
        super().__init__(draft, max_len + draft.vectors.shape[0] * draft.max_depth)
        self._heard: Tensor | None = None  # [k, H] behind the last token before the last certain one
        self._heard_by = draft
        self._guessed: Tensor | None = None  # [k, V] logits of it
        self._asked: list[tuple[int, int]] = []  # of each row the first vector's number, and how many a chain has
        self._sure = [(1, 1.0)] * draft.max_depth  # of each place how often it guessed, and the sum of its confidence

    def extend(self, token_ids: Tensor, hidden: Tensor) -> None:
        super().extend(token_ids, hidden)
        self._heard = self._guessed = None

    def ask(self, proposal: Proposal) -> Beside:
        counts = self.draft.allot(self._chances(proposal), self._right())
        vectors: list[Tensor] = []
        parents: list[int] = []
        self._asked = []
        for row, count in enumerate(counts):
            self._asked.append((len(parents), count))
            for chain in self.draft.vectors:
                above = len(counts) + len(parents)
                vectors.append(chain[:count])
                parents += [row, *range(above, above + count - 1)]
        return Beside(torch.cat(vectors), tuple(parents))

    def hear(self, states: Tensor, row: int) -> None:
        first, count = self._asked[row]
        self._heard = states[first : first + self.draft.params.ensemble * count].unflatten(0, (-1, count)).mean(0)
        self._heard_by = self.draft

    def propose(self, num_tokens: int, draw: Draw, go_on: GoOn | None = None) -> Proposal:
        """See the base; each place is a pass, though all were one."""
        guessed = self._guesses()
        return draft_chain(
            lambda proposed: guessed[len(proposed)], min(num_tokens, len(guessed)), draw, go_on, guessed.device
        )

    def expand(self, token_ids: Sequence[int], parents: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """See `models.core.drafting.drafters.Expander`; nothing follows a node as deep as there were vectors."""
        guessed = self._guesses().log_softmax(-1)
        found = guessed.new_full((len(nodes), guessed.shape[-1]), float("-inf"))
        for place, node in enumerate(nodes):
            depth = len(path_to(node, token_ids, parents))
            if depth < len(guessed):
                found[place] = guessed[depth]
        return found

    def _guesses(self) -> Tensor:
        """Return [k, V] logits of the places after the last certain token; k ≤ K."""
        if self._guessed is None or self._heard_by is not self.draft:
            target = self._listen()
            assert self._heard is not None
            self._guessed = target.logits(self._heard.to(target.dtype))
            for place, logits in enumerate(self._guessed):
                times, total = self._sure[place]
                self._sure[place] = times + 1, total + confidence(logits)
        return self._guessed

    def _listen(self) -> Decoder:
        """Return the target; where it was not asked, it reads all vectors in a pass of their own."""
        target, cache = self.target_and_cache()
        if self._heard is None or self._heard_by is not self.draft:
            start, size = cache.length, self.draft.max_depth
            parents = [row - 1 if row % size else -1 for row in range(self.draft.vectors[..., 0].numel())]
            nothing = torch.empty(0, dtype=torch.int64, device=target.device)
            states, _ = target.forward(nothing, cache, (), parents, vectors=self.draft.vectors.flatten(0, 1))
            cache.length = start
            self._heard, self._heard_by = states.unflatten(0, (-1, size)).mean(0), self.draft
        return target

    def _chances(self, proposal: Proposal) -> list[float]:
        """Return for each row how likely the draft finds it to be the last that is accepted."""
        guessed, tokens = self._guesses().softmax(-1), proposal.token_ids[0]
        depths = torch.tensor([len(path) - 1 for path in proposal.paths[1:]], device=tokens.device)
        chances = [1.0]
        for parent, chance in zip(proposal.parents, guessed[depths, tokens].tolist(), strict=True):
            chances.append(chances[parent + 1] * chance)
        last = list(chances)
        for node, parent in enumerate(proposal.parents):
            last[parent + 1] -= chances[node + 1]
        return last

    def _right(self) -> list[float]:
        """Return for each place how likely all guesses up to it are right, by how sure the draft was so far."""
        return list(accumulate((total / times for times, total in self._sure), mul))


class Format(draft_format.Format[PromptTokens]):
    def check(self, directory: Path, like: Path | None, target: TargetCard) -> None:
        """See the base; settings that can't be are refused as well."""
        read_params(self.read(directory), FAMILY, Params, directory)
        super().check(directory, like, target)


_format = Format(FAMILY, ARCHITECTURES, PromptTokens, ("hidden_size", "vocab_size"))
renew, save, load, check = _format.renew, _format.save, _format.load, _format.check
vllm_config, vllm_weights = _format.vllm_config, _format.vllm_weights


def create(params: Params, target_dir: Path, token_counts: np.ndarray) -> PromptTokens:
    """Make vectors that are embeddings of the commonest tokens, each one's its own; see `models.drafts.Family`."""
    require_llama_layout(target_config(target_dir).model_type, FAMILY)
    card = describe(target_dir)
    sizes = {"hidden_size": card.hidden_size, "vocab_size": card.vocab_size, "dtype": "bfloat16"}
    draft = _format.new({FAMILY: params.model_dump(mode="json"), **sizes}, target_dir)
    commonest = np.argsort(-np.asarray(token_counts), kind="stable")
    chosen = np.resize(commonest, params.ensemble * params.num_prompts)
    embedding = read_tensor(target_dir, "model.embed_tokens.weight").float()
    with torch.no_grad():
        draft.vectors.copy_(embedding[torch.from_numpy(chosen)].view_as(draft.vectors))
    return draft
