import pytest
import torch
from safetensors.torch import save_file

from models.core.drafting.draft_files import read_vocabulary


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"d2t": torch.tensor([1, 1, 4])}, {1, 2, 6}),
        ({"token_map": torch.tensor([3, 5])}, {3, 5}),
        ({"fc.weight": torch.zeros(1)}, None),
    ],
)
def test_a_drafts_vocabulary_is_read_off_its_files(tmp_path, tensors, found) -> None:  # type: ignore[no-untyped-def]
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_vocabulary(tmp_path) == found
