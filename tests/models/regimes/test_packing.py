import pytest
import torch
from transformers import LlamaForCausalLM

from models.core.learning.training import pad
from models.regimes import packing
from tests.models.regimes.world import documents, gradients


def test_rows_are_filled_by_hand() -> None:
    batch = packing.pack([[1, 2], [3, 4, 5], [6, 7, 8, 9]], row_tokens=6)
    assert batch.token_ids.tolist() == [[6, 7, 8, 9, 1, 2], [3, 4, 5, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [[-100, 7, 8, 9, -100, 2], [-100, 4, 5, -100, -100, -100]]


def test_a_document_longer_than_a_row_has_one_of_its_length() -> None:
    batch = packing.pack([[1, 2, 3, 4], [5, 6], [7, 8]], row_tokens=3)
    assert batch.token_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_equal_those_of_padded_rows(model, attention: str) -> None:
    model.set_attn_implementation(attention)
    padded, packed = pad(documents(7)), packing.pack(documents(7), 64)
    assert len(packed.token_ids) == 3 and len(padded.token_ids) == 7
    exact = gradients(model, input_ids=padded.token_ids, labels=padded.labels)
    again = gradients(model, input_ids=packed.token_ids, labels=packed.labels, position_ids=packed.position_ids)
    for name, gradient in exact.items():
        assert torch.allclose(gradient, again[name], rtol=1e-3, atol=1e-6 + 1e-4 * float(gradient.abs().max())), name


def test_a_model_that_attends_across_documents_is_refused(tiny_target) -> None:
    class Deaf(LlamaForCausalLM):
        def forward(self, position_ids=None, **settings):
            return super().forward(**settings)

    regime = packing.Hooks(packing.Params(), torch.Generator())
    with pytest.raises(ValueError, match="Deaf with attention sdpa attends across packed documents"):
        regime.start(Deaf.from_pretrained(tiny_target, dtype=torch.float32), 1)


def test_the_share_of_padding_is_told(tiny_target) -> None:
    regime = packing.Hooks(packing.Params(row_tokens=6), torch.Generator())
    regime.collate([[1, 2], [3, 4, 5], [6, 7, 8, 9]])
    assert regime.figures() == {"padding_share": pytest.approx(3 / 12)}


def test_rows_are_filled_from_all_documents_and_then_batches_from_rows(tiny_target) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 128, (200,), generator=rng).tolist()
    texts = [torch.randint(3, 259, (length,), generator=rng).tolist() for length in lengths]
    regime = packing.Hooks(packing.Params(row_tokens=128), torch.Generator())
    batches = regime.batches(texts, 512)
    assert sorted(document for batch in batches for document in batch) == sorted(texts)
    for batch in batches:
        assert regime.collate(batch).token_ids.numel() <= 512
    assert regime.figures()["padding_share"] < 0.03
