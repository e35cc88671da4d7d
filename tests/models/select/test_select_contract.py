"""Every selection: K rounds of b/K, each document once, seeded by its generator, and clear refusals."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from models import select
from models.catalog import load, names
from models.core.learning import training
from models.drafts import lm
from models.params import TrainingParams
from models.select import Sources, acceptance_gap, kcenter

METHODS = names("select")
HARD = range(5, 40, 7)
NEEDING = [name for name in METHODS if load("select", name).NEEDS_START]
POOL = [[3 + (7 * start + (start % 3) * place) % 60 for place in range(6 + start % 5)] for start in range(24)]


@pytest.fixture
def asked() -> list[list[int]]:
    """What was chosen each time that a proxy was trained."""
    return []


@pytest.fixture
def sources(model: PreTrainedModel, asked: list[list[int]]) -> Sources:
    def train(chosen: list[int]) -> PreTrainedModel:
        asked.append(chosen)
        settings = TrainingParams(batch_tokens=64)
        training.train(model, [POOL[place] for place in chosen], settings)
        return model

    def acceptance(chosen: list[int]) -> Tensor:
        asked.append(chosen)
        return 1 + torch.rand(len(POOL), generator=torch.Generator().manual_seed(len(chosen)))

    return Sources(train, lambda: model, acceptance)


def choose(name: str, sources: Sources, num_chosen: int = 10, num_rounds: int = 3, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return select.select(POOL, num_chosen, num_rounds, load("select", name).Params(), sources, rng)


@pytest.mark.parametrize("name", METHODS)
def test_each_document_is_chosen_once_and_as_many_as_wanted(name: str, sources: Sources) -> None:
    chosen = choose(name, sources)
    assert len(chosen) == len(set(chosen)) == 10
    assert all(0 <= place < len(POOL) for place in chosen)


@pytest.mark.parametrize("name", METHODS)
def test_all_of_the_pool_may_be_wanted(name: str, sources: Sources) -> None:
    assert sorted(choose(name, sources, num_chosen=len(POOL), num_rounds=2)) == list(range(len(POOL)))


@pytest.mark.parametrize("name", NEEDING)
def test_a_proxy_is_trained_on_what_the_rounds_before_chose(name, sources, asked) -> None:
    chosen = choose(name, sources)
    # 10 in 3 rounds: 4, 3, 3; the first is random and asks nothing, and each other round trains one proxy.
    assert asked == [chosen[:4], chosen[:7]]
    rng = torch.Generator().manual_seed(0)
    assert chosen[:4] == select.draw(len(POOL), (), 4, rng)


@pytest.fixture(scope="module")
def planted(tiny_target: Path) -> tuple[list[list[int]], Sources]:
    """Forty documents that count, five of them noise instead, and a proxy that learns counting well from any few."""
    rng = torch.Generator().manual_seed(0)
    pool = [[3 + (start + place) % 60 for place in range(16)] for start in range(40)]
    for place in HARD:
        pool[place] = torch.randint(3, 259, (16,), generator=rng).tolist()

    def train(chosen: list[int]) -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
        settings = TrainingParams(num_epochs=30, batch_tokens=160, learning_rate=5e-3)
        training.train(model, [pool[place] for place in chosen], settings)
        return model

    return pool, Sources(train)


@pytest.mark.parametrize("name", NEEDING)
def test_documents_that_nothing_predicts_come_first(name: str, planted: tuple[list[list[int]], Sources]) -> None:
    pool, proxies = planted
    rng = torch.Generator().manual_seed(0)
    chosen = select.select(pool, 15, 2, load("select", name).Params(), proxies, rng)
    left = set(HARD) - set(chosen[:8])
    assert len(left) >= 3
    assert left <= set(chosen[8 : 8 + len(left)])


@pytest.mark.parametrize(
    ("name", "chosen", "wanted"), [("entropy", [], [2, 1]), ("least_confidence", [], [1, 2]), ("margin", [2], [1, 0])]
)
def test_documents_are_picked_by_one_figure_by_hand(name: str, chosen: list[int], wanted: list[int]) -> None:
    proxy = select.Proxy([[1, 2]] * 3, Sources())
    proxy.certainty = select.Certainty(
        confidence=torch.tensor([0.9, 0.4, 0.6]),
        entropy=torch.tensor([0.3, 0.7, 1.5]),
        margin=torch.tensor([0.8, 0.3, 0.2]),
    )
    method = load("select", name)
    assert method.pick(proxy, chosen, 2, method.Params(), torch.Generator()) == wanted


@pytest.mark.parametrize("name", METHODS)
def test_a_seed_gives_one_choice(name: str, tiny_target: Path, sources: Sources) -> None:
    def again() -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
        return choose(name, Sources(lambda chosen: model, lambda: model, sources.acceptance), seed=5)

    assert again() == again()


@pytest.mark.parametrize(
    ("num_chosen", "num_rounds", "fault"),
    [
        (2, 3, "num_chosen must be at least num_rounds"),
        (2, 0, "num_chosen must be at least num_rounds"),
        (25, 3, "num_chosen must be at most 24, the documents of the pool; got 25"),
    ],
)
def test_counts_that_do_not_fit_are_refused(num_chosen: int, num_rounds: int, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        choose("random", Sources(), num_chosen, num_rounds)


@pytest.mark.parametrize("name", NEEDING)
def test_one_round_of_a_method_that_needs_a_start_is_refused(name: str, sources: Sources) -> None:
    with pytest.raises(ValueError, match=f"the first round of {name} is random"):
        choose(name, sources, num_rounds=1)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"random"}))
def test_a_source_that_is_missing_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="; give `"):
        choose(name, Sources())


def test_a_document_without_a_next_token_is_refused() -> None:
    with pytest.raises(ValueError, match="document 1 of the pool has 1 tokens"):
        select.select([[1, 2], [3]], 1, 1, load("select", "random").Params(), Sources(), torch.Generator())


def test_by_chance_every_document_is_chosen_about_equally_often() -> None:
    rng, counts, params = torch.Generator().manual_seed(0), torch.zeros(8), load("select", "random").Params()
    for _ in range(400):
        counts[select.select([[1, 2]] * 8, 2, 2, params, Sources(), rng)] += 1
    # Each count is binomial(400, 1/4) with deviation 8.7; all eight stay within 4.5 of them but in 1 of 20,000 seeds.
    assert (counts - 100).abs().max() < 4.5 * 8.7


def test_certainty_is_the_mean_over_a_documents_tokens(model: PreTrainedModel) -> None:
    found = select.certainty(model, [POOL[4], POOL[0]])
    with torch.no_grad():
        probs = model(torch.tensor([POOL[4]])).logits[0, :-1].softmax(-1)
    ordered = probs.sort(dim=-1, descending=True).values
    assert float(found.confidence[0]) == pytest.approx(float(ordered[:, 0].mean()), rel=1e-4)
    assert float(found.margin[0]) == pytest.approx(float((ordered[:, 0] - ordered[:, 1]).mean()), rel=1e-4)
    assert float(found.entropy[0]) == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-4)
    assert float(found.confidence[1]) == pytest.approx(float(select.certainty(model, [POOL[0]]).confidence[0]))


def test_features_are_mean_states_and_do_not_see_padding(model: PreTrainedModel) -> None:
    together = select.features(model, POOL)
    assert together.shape == (len(POOL), 128)
    assert torch.allclose(together[3], select.features(model, [POOL[3]])[0], atol=1e-4)


def test_acceptance_is_the_overlap_of_draft_and_target(tiny_target, model, tmp_path) -> None:
    draft = lm.create(lm.Params(num_layers=1), tiny_target, torch.ones(259).numpy())
    found = select.acceptance(draft, tiny_target, POOL[:3], 1, tmp_path)
    for place, document in enumerate(POOL[:3]):
        token_ids = torch.tensor([document])
        with torch.no_grad():
            p = model(token_ids).logits[0].softmax(-1)
            q = draft.lm_head(draft.model(token_ids).last_hidden_state)[0].softmax(-1)
        # A step begins after each token of the answer but the last one: it drafts what follows tokens 1 … T−2.
        overlap = torch.minimum(p, q).sum(-1)[1:-1].mean()
        assert float(found[place]) == pytest.approx(1 + float(overlap), abs=0.01)  # states are kept in bfloat16
    with pytest.raises(ValueError, match="document 0 has 3 tokens; acceptance takes at least 4"):
        select.acceptance(draft, tiny_target, [[1, 2, 3]], 1, tmp_path)


def test_logits_of_no_more_documents_are_held_than_fit(model: PreTrainedModel) -> None:
    sizes: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: sizes.append(output.numel()))
    whole = select.certainty(model, POOL)
    assert len(sizes) == 1
    few = select.certainty(model, POOL, max_logits=30 * 259)
    assert max(sizes[1:]) <= 30 * 259 and len(sizes) > 2
    torch.testing.assert_close(few.entropy, whole.entropy)


def by_gap(sources: Sources, num_chosen: int, num_rounds: int) -> list[int]:
    return select.select([[1, 2]] * 8, num_chosen, num_rounds, acceptance_gap.Params(), sources, torch.Generator())


def test_by_acceptance_gap_the_planted_documents_come_first_and_each_round_asks_the_draft_of_its_own() -> None:
    lengths = torch.tensor([2.5, 1.2, 2.9, 1.1, 2.8, 2.6, 1.3, 2.7])

    def accepted(chosen: list[int]) -> Tensor:
        # A draft that learnt document 3 is accepted on 6 as well.
        return lengths.index_fill(0, torch.tensor([6]), 3.0) if 3 in chosen else lengths

    assert by_gap(Sources(acceptance=accepted), 2, 1) == [3, 1]
    assert by_gap(Sources(acceptance=accepted), 3, 1) == [3, 1, 6]
    assert by_gap(Sources(acceptance=accepted), 4, 2) == [3, 1, 0, 5]


@pytest.mark.parametrize(
    ("figures", "fault"),
    [
        ([1.0] * 3, r"acceptance must be \[8\], one a document; got \[3\]"),
        ([1.0] * 5 + [float("nan")] + [1.0] * 2, "document 5 has no score"),
    ],
)
def test_documents_without_a_figure_are_refused(figures: list[float], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        by_gap(Sources(acceptance=lambda chosen: torch.tensor(figures)), 2, 1)


def proxy(states: Tensor) -> select.Proxy:
    """A proxy whose target's states are given."""
    made = select.Proxy([[1, 2]] * len(states), Sources())
    made.features = states
    return made


def pick(states: Tensor, chosen: list[int], num_wanted: int, seed: int = 0) -> list[int]:
    return kcenter.pick(proxy(states), chosen, num_wanted, kcenter.Params(), torch.Generator().manual_seed(seed))


def test_kcenter_on_a_line_by_hand() -> None:
    states = torch.tensor([[0.0], [1.0], [4.0], [9.0], [10.0]])
    # From 1 the farthest is 10 (at 9); then 4, 3 from 1 and 6 from 10, before 0 and 9, each at 1; of equals the first.
    assert pick(states, [1], 4) == [4, 2, 0, 3]


def test_by_kcenter_copies_of_a_chosen_document_come_last_and_none_comes_twice() -> None:
    states = torch.tensor([[0.0], [0.0], [5.0], [0.0]])
    assert pick(states, [0], 3) == [2, 1, 3]
