import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.core.learning import training
from models.libraries import duo_llm
from models.libraries.duo_llm import Duo, RandomRouting
from models.params import TrainingParams
from tests.models.regimes.world import load

NUM_LAYERS = 2


def document(start: int, length: int = 20) -> list[int]:
    """Steps of three through 60 tokens."""
    return [3 + (start + 3 * place) % 60 for place in range(length)]


def loss(model: PreTrainedModel, duos: list[Duo], ways: Tensor, texts: list[list[int]]) -> float:
    return float(torch.stack([duo_llm.losses(model, duos, text, ways[:, None])[0].mean() for text in texts]).mean())


def everywhere(*big: bool) -> Tensor:
    """[L, T − 1], the same for all tokens."""
    return torch.tensor(big)[:, None].repeat(1, 19)


@pytest.fixture(scope="module")
def learnt(tiny_target: Path) -> Iterator[tuple[PreTrainedModel, list[Duo]]]:
    """A model that knows its documents, then small modules that were trained beside it."""
    model = load(tiny_target)
    texts = [document(start) for start in range(20)]
    settings = TrainingParams(num_epochs=12, batch_tokens=160, learning_rate=3e-3)
    training.train(model, texts, settings, seed=0)
    duos = duo_llm.insert(model, 8, torch.Generator().manual_seed(0))
    training.train(model, texts, settings, [RandomRouting(duos, 0.5, torch.Generator().manual_seed(1))], seed=0)
    return model, duos


def test_all_big_is_the_model_itself_bit_for_bit(tiny_target: Path) -> None:
    token_ids, model = torch.tensor([document(0)]), load(tiny_target)
    with torch.no_grad():
        before = model(token_ids).logits
        duos = duo_llm.insert(model, 8, torch.Generator().manual_seed(0))
        assert torch.equal(model(token_ids).logits, before)
        with duo_llm.routed(duos, duo_llm.fixed(torch.ones(NUM_LAYERS, 1, 20, dtype=torch.bool))):
            assert torch.equal(model(token_ids).logits, before)
        with duo_llm.routed(duos, duo_llm.fixed(torch.zeros(NUM_LAYERS, 1, 20, dtype=torch.bool))):
            assert not torch.equal(model(token_ids).logits, before)
        assert torch.equal(model(token_ids).logits, before)  # the routes are gone


def test_a_token_goes_its_own_way_and_changes_nothing_before_it(learnt: tuple[PreTrainedModel, list[Duo]]) -> None:
    model, duos = learnt
    ways = torch.ones(NUM_LAYERS, 2, 19, dtype=torch.bool)
    ways[:, 1, 9] = False
    one, other = duo_llm.losses(model, duos, document(0), ways)
    torch.testing.assert_close(one[:9], other[:9])
    assert abs(float(one[9] - other[9])) > 1e-4


def test_only_small_modules_learn_and_they_do(model: PreTrainedModel) -> None:
    duos = duo_llm.insert(model, 8, torch.Generator().manual_seed(0))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    texts = [document(start) for start in range(6)]
    small = loss(model, duos, everywhere(False, False), texts)
    settings = TrainingParams(num_epochs=40, batch_tokens=120, learning_rate=1e-2)
    training.train(model, texts, settings, [RandomRouting(duos, 0.5, torch.Generator().manual_seed(1))])
    moved = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved and all(".mlp.up." in name or ".mlp.down." in name for name in moved)
    assert loss(model, duos, everywhere(False, False), texts) < small - 0.1


def test_an_oracle_of_more_modules_never_loses_more_on_what_it_chooses_first(learnt) -> None:
    model, duos = learnt
    for start in range(4):
        costs = []
        for number in range(NUM_LAYERS + 1):
            ways = duo_llm.oracle(model, duos, document(start, 3), number)
            assert int(ways.sum(dim=0).max()) <= number
            costs.append(float(duo_llm.losses(model, duos, document(start, 3), ways[:, None])[0, 0]))
        assert all(after <= before + 1e-5 for before, after in pairwise(costs))
        whole = torch.ones(NUM_LAYERS, 1, 2, dtype=torch.bool)
        assert costs[-1] <= float(duo_llm.losses(model, duos, document(start, 3), whole)[0, 0]) + 1e-5


def test_where_big_modules_say_what_small_ones_do_none_is_taken(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight.zero_()
    duos = duo_llm.insert(model, 8, torch.Generator().manual_seed(0))
    assert not duo_llm.oracle(model, duos, document(0, 6), 2).any()


def test_routers_learn_what_was_chosen_and_route_by_it(learnt: tuple[PreTrainedModel, list[Duo]]) -> None:
    model, duos = learnt
    texts = [document(start) for start in range(12)]
    read = torch.cat([duo_llm.inputs(model, duos, text, everywhere(True, True)) for text in texts], dim=1)
    chosen = read[..., 0] > read[..., 0].median(dim=1, keepdim=True).values
    routers = duo_llm.fit_routers(read, chosen)
    for router, features, wanted in zip(routers, read, chosen, strict=True):
        says = router(features).flatten()
        assert float(((says > says.median()) == wanted).float().mean()) > 0.9
    token_ids = torch.tensor([document(0)])
    for threshold, big in ((-math.inf, True), (math.inf, False)):
        loss_of = duo_llm.losses(model, duos, document(0), everywhere(big, big)[:, None])[0].mean()
        with torch.no_grad(), duo_llm.routed(duos, duo_llm.by_routers(routers, [threshold] * NUM_LAYERS)):
            found = model(input_ids=token_ids, labels=token_ids, use_cache=False).loss
        torch.testing.assert_close(found, loss_of)


def test_what_can_not_be_is_refused(learnt: tuple[PreTrainedModel, list[Duo]]) -> None:
    model, duos = learnt
    for call, fault in (
        (lambda: duo_llm.insert(model, 8, torch.Generator()), "the model has small modules already"),
        (lambda: duo_llm.insert(model, 0, torch.Generator()), "small_width must be from 1, got 0"),
        (lambda: duo_llm.oracle(model, duos, document(0), 3), "num_big must be from 0 to 2, got 3"),
        (lambda: duo_llm.oracle(model, duos, [5], 1), "wanted 2 tokens and more, got 1"),
        (lambda: RandomRouting(duos, 1.5, torch.Generator()), r"big_share must be from 0 to 1, got 1\.5"),
    ):
        with pytest.raises(ValueError, match=fault):
            call()
