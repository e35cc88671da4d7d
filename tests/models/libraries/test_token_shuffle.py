import math

import pytest
import torch
from torch import Tensor, nn

from models.libraries.token_shuffle import Shuffle, Unshuffle, merge, shifted, split

VOCABULARY, WIDTH = 4, 16


def test_windows_are_merged_by_hand() -> None:
    image = torch.arange(16).view(1, 4, 4, 1)
    merged = merge(image, 2)
    assert merged.shape == (1, 2, 2, 4)
    assert merged[0, 0, 0].tolist() == [0, 1, 4, 5] and merged[0, 1, 0].tolist() == [8, 9, 12, 13]


@pytest.mark.parametrize(("rows", "columns", "side"), [(4, 6, 2), (3, 9, 3), (5, 7, 1), (8, 4, 4)])
def test_taking_windows_apart_is_the_exact_inverse(rows: int, columns: int, side: int) -> None:
    states = torch.randn(2, rows, columns, 3, generator=torch.Generator().manual_seed(0))
    merged = merge(states, side)
    assert torch.equal(split(merged, side), states)
    assert torch.equal(merged, states) == (side == 1)
    assert torch.equal(merge(split(merged, side), side), merged)
    assert merged.numel() == states.numel()


class ImageModel(nn.Module):
    """Says each window from the one before it."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.shuffle, self.unshuffle = Shuffle(WIDTH, side), Unshuffle(WIDTH, side)
        self.middle = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.num_steps = 0

    def forward(self, images: Tensor) -> Tensor:
        """[B, R, C] tokens → [B, R, C, V] logits."""
        merged = self.shuffle(self.embedding(images))
        said = self.middle(shifted(merged))
        self.num_steps = said.shape[1]
        return self.head(self.unshuffle(said.view(merged.shape)))


def trained(images: Tensor, side: int) -> tuple[ImageModel, Tensor]:
    """Return a model and its loss [B, R/s · C/s, s²] of each token, window by window."""
    torch.manual_seed(0)
    model = ImageModel(side)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(model(images).movedim(-1, 1), images, reduction="none")
        losses.mean().backward()
        optimizer.step()
    return model, merge(losses.detach()[..., None], side).flatten(1, 2)


def windows_in_a_row(first: Tensor) -> Tensor:
    """[B, 4, 8] images of 2 × 2 windows: [B, 2, 2] the first, and each next one the one before, every token + 1."""
    row = [(first + number) % VOCABULARY for number in range(8)]
    return torch.cat([torch.cat(row[:4], dim=2), torch.cat(row[4:], dim=2)], dim=1)


@pytest.mark.slow
def test_a_model_learns_windows_that_follow_from_those_before_in_a_quarter_of_the_steps() -> None:
    first = torch.randint(VOCABULARY, (64, 2, 2), generator=torch.Generator().manual_seed(0))
    model, losses = trained(windows_in_a_row(first), 2)
    assert model.num_steps == 4 * 8 / 4
    assert float(losses[:, 1:].mean()) < 0.05
    assert float(losses[:, 0].mean()) == pytest.approx(math.log(VOCABULARY), rel=0.05)  # nothing tells of the first


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"windows of 2 × 2; got \[1, 3, 4, 2\]"):
        merge(torch.zeros(1, 3, 4, 2), 2)
    with pytest.raises(ValueError, match="must hold 2 × 2 tokens"):
        split(torch.zeros(1, 2, 2, 6), 2)
    with pytest.raises(ValueError, match="windows of 9 tokens, which don't divide a width of 16"):
        Shuffle(16, 3)
