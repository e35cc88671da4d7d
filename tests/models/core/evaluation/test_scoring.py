"""What a draft is scored with, on a toy whose exact value is a sum over all answers.

Four tokens, of which the draft can say three; the target is a real model, the draft a table by the last token. The
score of an answer is a random number through the answer alone, so its mean over answers is a sum too, and drawn answers
must agree with it as well as their number lets them.
"""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models.core.evaluation.scoring import STANDARD, score, trace
from models.core.learning.hidden import Sample
from models.drafts import Draft, Drafter, KeepRows, Rows, Unrolled

SIZE, LENGTH, PROMPT = 4, 5, (1, 2, 3)
ANSWERS = list(product(range(SIZE), repeat=LENGTH))
NUM_DRAWN = 5000
Laws = dict[tuple[int, ...], Tensor]


class Table(Draft):
    """q of the next token by the last one; token 1 can't be drafted."""

    taps = ()
    vocabulary = torch.tensor([0, 2, 3])

    def __init__(self, draws: bool = True) -> None:
        super().__init__()
        self.draws = draws  # or drafts the likeliest token
        self.logits = 1.5 * torch.randn(SIZE, 3, generator=torch.Generator().manual_seed(4))

    def unroll(self, rows: Rows, num_steps: int, keep: KeepRows | None = None) -> list[Unrolled]:
        running, drafted = torch.arange(len(rows.index)), []
        for step in range(num_steps):
            logits = self.logits[rows.token_ids[rows.sequence[running], rows.index[running] + 1 + step]]
            drafted.append(Unrolled(running, logits))
            if keep is not None and step + 1 < num_steps:
                running = running[keep(step, running, logits)]
        return drafted

    def drafter(self, max_len: int) -> Drafter:
        raise NotImplementedError

    def chain(self, length: int) -> list[int]:
        """Return the likeliest tokens from 0 on."""
        said = [0]
        while len(said) < length:
            said.append(int(self.vocabulary[self.logits[said[-1]].argmax()]))
        return said

    def q(self, last: int, temperature: float) -> list[float]:
        """[V]."""
        law = (self.logits[last] / temperature).softmax(-1)
        if not self.draws:
            law = (law == law.max()).float()
        return torch.zeros(SIZE).index_copy_(0, self.vocabulary, law).tolist()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.25, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def laws(target: Path) -> Laws:
    """Completion so far → the target's logits [V] of what follows."""
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *answer] for answer in ANSWERS])).logits
    return {
        answer[:told]: logits[number, len(PROMPT) - 1 + told]
        for number, answer in enumerate(ANSWERS)
        for told in range(LENGTH)
    }


def chance(laws: Laws, tokens: tuple[int, ...], temperature: float) -> float:
    """Probability that the target's answer begins so."""
    value = 1.0
    for place, token in enumerate(tokens):
        value *= float((laws[tokens[:place]] / temperature).softmax(-1)[token])
    return value


def accepted(laws: Laws, draft: Table, told: tuple[int, ...], num_steps: int, temperature: float) -> float:
    """Tokens that speculative sampling accepts on average after `told`, of at most `num_steps`."""
    if num_steps == 0:
        return 0.0
    p = (laws[told] / temperature).softmax(-1).tolist()
    kept = [min(pair) for pair in zip(p, draft.q(told[-1], temperature), strict=True)]
    return sum(
        share * (1 + accepted(laws, draft, (*told, token), num_steps - 1, temperature))
        for token, share in enumerate(kept)
        if share
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "temperature", "draws"), [(3, 0.7, True), (1, 1.0, True), (4, 1.3, True), (3, 0.7, False)]
)
def test_the_score_of_sampled_answers_is_what_speculation_accepts(
    target: Path, laws: Laws, tmp_path: Path, num_steps: int, temperature: float, draws: bool
) -> None:
    draft = Table(draws)
    exact = sum(
        chance(laws, told, temperature) * accepted(laws, draft, told, min(num_steps, LENGTH - begun), temperature)
        for begun in range(1, LENGTH)
        for told in product(range(SIZE), repeat=begun)
    )
    samples = [Sample(str(n), "d", list(PROMPT), list(answer), temperature) for n, answer in enumerate(ANSWERS)]
    scored = score(draft, target, samples, num_steps, tmp_path, rules=STANDARD._replace(draws=draws))
    assert {one.steps for one in scored} == {LENGTH - 1}
    values = torch.tensor([one.accepted for one in scored], dtype=torch.float64)
    chances = torch.tensor([chance(laws, answer, temperature) for answer in ANSWERS], dtype=torch.float64)
    assert float(chances.sum()) == pytest.approx(1, abs=1e-5)
    assert float((chances * values).sum()) == pytest.approx(exact, rel=0.01)  # the target's states are kept in bfloat16
    drawn = values[torch.multinomial(chances, NUM_DRAWN, replacement=True, generator=torch.Generator().manual_seed(0))]
    assert float(drawn.mean()) == pytest.approx(exact, abs=4 * float(drawn.std()) / NUM_DRAWN**0.5 + 0.01 * exact)


def test_the_score_of_a_greedy_answer_is_the_engines_count(target: Path, laws: Laws, tmp_path: Path) -> None:
    draft, answer = Table(), ()
    while len(answer) < LENGTH:
        answer = (*answer, int(laws[answer].argmax()))
    steps = kept = 0
    begun = 1
    while begun < LENGTH:
        right = 0
        while right < 3 and begun + right < LENGTH:
            said = draft.vocabulary[draft.logits[answer[begun + right - 1]].argmax()]
            if int(said) != answer[begun + right]:
                break
            right += 1
        steps, kept, begun = steps + 1, kept + right, begun + right + 1
    (scored,) = score(draft, target, [Sample("g", "d", list(PROMPT), list(answer))], 3, tmp_path)
    assert (scored.steps, scored.accepted) == (steps, kept)


def test_a_trace_tells_each_step_that_the_score_counts(target: Path, tmp_path: Path) -> None:
    draft = Table()
    answer = [*draft.chain(6), 1]  # which the draft can't say
    sample = Sample("g", "d", list(PROMPT), answer)
    [told], [scored] = trace(draft, target, [sample], 2, tmp_path), score(draft, target, [sample], 2, tmp_path)
    # Token 0 comes from the prefill; two are right and a third comes with them, then two and the one it can't say.
    assert (told.drafted, told.accepted) == ((2, 2), (2, 2))
    assert (scored.steps, scored.accepted) == (len(told.drafted), sum(told.accepted))
    assert (scored.tokens, scored.covered) == (6, 5)
    with pytest.raises(ValueError, match="answer g was sampled; wanted greedy ones"):
        trace(draft, target, [sample._replace(temperature=1.0)], 2, tmp_path)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_only_what_the_head_drafts_counts_up_to_k_a_step(target: Path, tmp_path: Path, num_steps: int) -> None:
    draft = Table()
    repeated = Sample("repeated", "d", [1] * 8, [1] * 8)  # look-up would draft all of it, the head can't say token 1
    own = Sample("own", "d", list(PROMPT), draft.chain(13))
    of_repeated, of_own = score(draft, target, [repeated, own], num_steps, tmp_path)
    assert (of_repeated.steps, of_repeated.accepted) == (7, 0)
    assert of_own.accepted / of_own.steps == num_steps
