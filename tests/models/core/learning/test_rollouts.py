from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models import catalog
from models.answers import mixed_tokens, on_policy
from models.core.checkpoints.readout import Readout
from models.core.drafting.draft_families import family_named, is_trained
from models.core.layers.decoder import Cache, Decoder
from models.core.learning import distill
from models.core.learning.hidden import Sample, pack
from models.core.learning.rollouts import Rollouts, write
from models.core.learning.teacher import probs
from models.drafts import Draft, eagle3, lm
from tests.models import planted
from tests.models.core.learning.runs import Killed, require_equal, short
from tests.models.drafts.answered import tau_of
from tests.models.drafts.tiny import make_tiny

TRAINED = [name for name in catalog.names("drafts") if is_trained(family_named(name))]
SAMPLE = Sample("a", "d", [5, 9, 14, 30, 31], list(range(40, 60)))
NEVER: frozenset[int] = frozenset()
K = 3


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def decoder(tiny_target: Path) -> Decoder:
    return Decoder.load(tiny_target, torch.float32)


@pytest.fixture
def small(tiny_target: Path) -> lm.Lm:
    return lm.create(lm.Params(num_layers=1), tiny_target, np.ones(259))


@torch.inference_mode()
def test_a_draft_that_reads_text_alone_writes_what_it_says_without_a_target(small: lm.Lm, decoder: Decoder) -> None:
    written = write(small, decoder, SAMPLE, [True] * 20, 0.0, K, NEVER, rng())
    text = [*SAMPLE.prompt_ids, SAMPLE.completion_ids[0]]
    while len(text) < 25:
        states = small.model(input_ids=torch.tensor([text])).last_hidden_state
        text.append(int(small.lm_head(states[0, -1]).argmax()))
    assert written == text[5:]


@pytest.mark.slow
@torch.inference_mode()
def test_tokens_are_drawn_from_the_drafts_distribution(small: lm.Lm, decoder: Decoder) -> None:
    states = small.model(input_ids=torch.tensor([[*SAMPLE.prompt_ids, 40]])).last_hidden_state
    q = (small.lm_head(states[0, -1]) / 0.5).softmax(-1)
    drawn = rng()
    counts = Counter(write(small, decoder, SAMPLE, [True] * 2, 0.5, K, NEVER, drawn)[1] for _ in range(600))
    share = torch.tensor([counts[token] / 600 for token in range(len(q))])
    # As far from q as 600 honest draws would be, and not as far as the target's own distribution is.
    honest = torch.multinomial(q, 600, replacement=True, generator=rng(1)).bincount(minlength=len(q)) / 600
    assert (share - q).abs().sum() < 1.25 * (honest - q).abs().sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_in_every_family_each_writes_its_own_tokens(name: str, tiny_target: Path, decoder: Decoder) -> None:
    draft = make_tiny(family_named(name), tiny_target)
    target = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    by_draft = [place % 5 not in (0, 4) for place in range(20)]  # three of the draft's, then two of the target's
    with torch.inference_mode():
        written = write(draft, decoder, SAMPLE, by_draft, 0.0, K, NEVER, rng())
        likeliest = target(torch.tensor([[*SAMPLE.prompt_ids, *written]])).logits[0, 4:-1].argmax(-1).tolist()
        drafted = _drafted(draft, decoder, [*SAMPLE.prompt_ids, written[0]])
    of_target = [place for place, own in enumerate(by_draft) if not own]
    assert len(written) == 20
    assert [written[place] for place in of_target[1:]] == [likeliest[place] for place in of_target[1:]]
    assert written[1:4] == drafted


def _drafted(draft: Draft, target: Decoder, text: list[int]) -> list[int]:
    """Return the likeliest tokens that it drafts after a text."""
    cache = Cache(target, len(text) + 8)
    drafter = draft.drafter(cache.max_len)
    if hasattr(drafter, "share"):
        drafter.share(target, cache)
    _, tapped = target.forward(torch.tensor(text[:-1]), cache, draft.taps)
    drafter.extend(torch.tensor(text), tapped)
    return drafter.propose(3, lambda logits: (int(draft.vocabulary[logits.argmax()]), None)).token_ids[0].tolist()


@pytest.mark.parametrize("by_draft", [True, False])
@torch.inference_mode()
def test_an_answer_ends_where_a_token_ends_it_whoever_writes_it(by_draft: bool, small: lm.Lm, decoder: Decoder) -> None:
    whole = write(small, decoder, SAMPLE, [by_draft] * 20, 0.0, K, NEVER, rng())
    stop = whole[4]
    cut = write(small, decoder, SAMPLE, [by_draft] * 20, 0.0, K, frozenset([stop]), rng())
    assert cut == whole[: whole.index(stop) + 1]


def rounds(draft: Draft, target: Path, samples: list[Sample], work: Path, **changes: object) -> Rollouts:
    return Rollouts(draft, target, samples, on_policy.Params(**changes), K, work, 0)


def test_labels_are_what_the_target_says_of_the_drafts_text(tiny_target: Path, tmp_path: Path) -> None:
    draft = make_tiny(family_named("eagle3"), tiny_target)
    samples = [SAMPLE._replace(id=str(number), prompt_ids=[5, 9, number]) for number in range(3, 7)]
    states = rounds(draft, tiny_target, samples, tmp_path).begin(0, "key", lambda *done: None)
    readout, model = Readout.load(tiny_target, rows=draft.vocabulary), AutoModelForCausalLM.from_pretrained(tiny_target)
    for sample in states.samples:
        assert sample.completion_ids != SAMPLE.completion_ids
        rows, final, log_sums, _ = pack([sample], states, 1, draft)
        places = rows.index + 1
        with torch.inference_mode():
            labels = probs(readout, readout.norm(final[0, places]), log_sums[0, places])
            p = model(torch.tensor([sample.token_ids])).logits[0, places].float().softmax(-1)[:, draft.vocabulary]
        torch.testing.assert_close(labels, p, rtol=0.1, atol=2e-3)  # states are kept in bfloat16


def test_what_was_written_is_kept_until_the_next_round(tiny_target: Path, tmp_path: Path) -> None:
    draft, told = make_tiny(family_named("eagle3"), tiny_target), []

    def begin(number: int, key: str) -> list[Sample]:
        return run.begin(number, key, lambda *done: told.append(done[0])).samples

    run = rounds(draft, tiny_target, [SAMPLE], tmp_path)
    first = begin(0, "key")
    run = rounds(draft, tiny_target, [SAMPLE], tmp_path)
    assert begin(0, "key") == first
    assert told.count("answers") == 1
    assert begin(0, "another run") == first
    assert begin(1, "key") != first
    assert len(list((tmp_path / "written").iterdir())) == 1
    run.end()
    assert not (tmp_path / "written").exists()
    assert [run.at(step, 8) for step in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_draft_that_only_ends_answers_is_refused(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.core.learning.rollouts.stop_ids", lambda directory: frozenset(range(259)))
    draft = make_tiny(family_named("eagle3"), tiny_target)
    with pytest.raises(ValueError, match="the draft ended all of 1 answers at once.*learn the target's answers first"):
        rounds(draft, tiny_target, [SAMPLE], tmp_path).begin(0, "key", lambda *done: None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    planted.build(directory := tmp_path_factory.mktemp("planted"))
    return directory


@pytest.fixture(scope="module")
def learnt(target: Path) -> list[Sample]:
    return planted.answers(target, 24, 1.0, seed=0)


def head(target: Path) -> eagle3.Eagle3:
    return eagle3.create(eagle3.Params(vocab_size=70), target, np.ones(259))


@pytest.mark.slow
def test_a_run_killed_while_it_wrote_or_learnt_ends_the_same(
    target: Path, learnt: list[Sample], tmp_path: Path
) -> None:
    params = short(num_epochs=2, checkpoint_s=0.0, answers={"name": "mixed_tokens", "rounds": 2})

    def run(folder: str, stage: str = "", at: int = 0) -> eagle3.Eagle3:
        made, told = head(target), iter(range(at))

        def on_progress(progress: distill.Progress) -> None:
            if progress.stage == stage and next(told, None) is None:
                raise Killed

        distill.train(made, target, learnt, params, K, tmp_path / folder, on_progress=on_progress)
        return made

    for stage, at in (("answers", 30), ("hidden states", 0)):  # the former in the second round
        with pytest.raises(Killed):
            run("cut", stage, at)
    require_equal(run("whole"), run("cut"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in catalog.names("answers") if catalog.load("answers", name).WRITES])
def test_a_draft_learns_from_text_that_it_helped_to_write(
    name: str, target: Path, learnt: list[Sample], tmp_path: Path
) -> None:
    held_out, draft = planted.answers(target, 8, 0.0, seed=1), head(target)
    before = tau_of(draft, target, held_out, K, tmp_path)
    params = short(num_epochs=14, learning_rate=4e-3, answers={"name": name})
    distill.train(draft, target, learnt, params, K, tmp_path / name)
    after = tau_of(draft, target, held_out, K, tmp_path)
    assert before < 1.5 < 1.9 < after, (before, after)


def test_the_share_of_tokens_is_as_asked() -> None:
    for share in (0.2, 0.7):
        writers = mixed_tokens.by_draft([50] * 80, mixed_tokens.Params(share=share), rng())
        own = sum(sum(of) for of in writers if of is not None) / 4000
        assert own == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)
