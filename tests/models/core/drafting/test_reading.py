"""What a model reads is read once: drafted tokens that were right stay in its cache."""

from pathlib import Path

import torch
from torch import Tensor

from models.core.drafting.reading import Reader
from models.core.layers.decoder import Decoder


class Counting(Decoder):
    """Notes how many tokens each pass reads."""

    def forward(self, token_ids: Tensor, *rest: object, **more: object) -> tuple[Tensor, Tensor]:
        self.read.append(len(token_ids))
        return super().forward(token_ids, *rest, **more)


class Whole(Reader):
    """Drafts with the whole target."""

    def decoder(self) -> Decoder:
        return self.draft


@torch.inference_mode()
def test_only_what_was_not_read_yet_is_read(tiny_target: Path) -> None:
    target = Counting.load(tiny_target, torch.float32)
    target.read = []
    drafter = Whole(target, 20)
    drafter.extend(torch.tensor([3, 4, 5, 6]), torch.empty(3, 0))
    proposed = drafter.propose(3, lambda logits: (int(logits.argmax()), None)).token_ids[0].tolist()
    assert target.read == [4, 1, 1]
    drafter.extend(torch.tensor([6, *proposed, 9]), torch.empty(4, 0))  # all were right
    drafter.propose(1, lambda logits: (7, None))
    assert target.read[3:] == [2]  # the last drafted one was not read, nor the one after it
    drafter.extend(torch.tensor([9, 8]), torch.empty(1, 0))  # 7 was wrong, and never read
    drafter.expand([10, 11], [-1, -1], [-1, 0])
    assert target.read[4:] == [2]
