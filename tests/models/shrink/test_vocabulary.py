import pytest
import torch
from transformers import PreTrainedModel

from models.params import TrainingParams
from models.shrink import vocabulary

TRAINING = TrainingParams()
TEXTS = [[10, 20, 30, 10, 20, 10], [40, 10, 20, 30]]


# The model's special tokens are 0 to 2: of them 1 begins and 2 ends a text.


def test_the_most_frequent_tokens_and_the_special_ones_stay_with_their_logits(model: PreTrainedModel) -> None:
    less = vocabulary.shrink(model, TEXTS, vocabulary.Params(vocab_size=5), TRAINING)
    kept = less.config.redraft["kept_tokens"]
    assert kept == [1, 2, 10, 20, 30]
    assert (less.config.vocab_size, less.config.bos_token_id, less.config.eos_token_id) == (5, 0, 1)
    assert less.generation_config.eos_token_id == 1
    with torch.no_grad():
        mine = less(torch.tensor([[2, 3, 4, 2]])).logits
        torch.testing.assert_close(mine, model(torch.tensor([[10, 20, 30, 10]])).logits[..., kept])


def test_a_vocabulary_that_is_cut_twice_names_the_first_one_s_tokens(model: PreTrainedModel) -> None:
    less = vocabulary.shrink(model, TEXTS, vocabulary.Params(vocab_size=6), TRAINING)
    least = vocabulary.shrink(less, [[2, 2, 4, 4, 3]], vocabulary.Params(vocab_size=4), TRAINING)
    assert less.config.redraft["kept_tokens"] == [1, 2, 10, 20, 30, 40]
    assert least.config.redraft["kept_tokens"] == [1, 2, 10, 30]


def test_texts_are_split_at_tokens_that_are_gone() -> None:
    assert vocabulary.narrow([10, 20, 99, 98, 1], [1, 10, 20]) == [[1, 2], [0]]
    assert vocabulary.narrow([99], [1, 10, 20]) == []


@pytest.mark.parametrize("size", [2, 259, 300])
def test_a_size_that_is_no_smaller_or_holds_no_text_is_refused(model: PreTrainedModel, size: int) -> None:
    with pytest.raises(ValueError, match=f"vocab_size must be 3 to 258, .*; got {size}"):
        vocabulary.shrink(model, TEXTS, vocabulary.Params(vocab_size=size), TRAINING)


@pytest.mark.parametrize(("texts", "found"), [([], "none"), ([[3, 259]], "3 to 259"), ([[-1, 4]], "-1 to 4")])
def test_tokens_of_another_vocabulary_are_refused(model: PreTrainedModel, texts: list[list[int]], found: str) -> None:
    with pytest.raises(ValueError, match=f"documents must hold token ids of 0 to 258; got {found}"):
        vocabulary.shrink(model, texts, vocabulary.Params(vocab_size=20), TRAINING)
