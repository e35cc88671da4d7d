import asyncio
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.core.drafting.draft_families import family_named, open_draft
from models.core.layers.decoder import Cache, Decoder
from models.drafts import Draft, early_exit, lm, ngram
from models.engines import Completion
from models.engines.torch import Params, TorchEngine
from models.engines.torch.request import Overlapped
from tests.models.drafts.answered import GREEDY, answer_all, prompts
from tests.models.drafts.hollow import make_hollow
from tests.models.drafts.tiny import make_tiny
from tests.models.engines.sampled import P_VALUE, sampled_p_value

PEARL = {"name": "pearl"}


@pytest.fixture(scope="module")
def hollow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of whose two layers the second adds nothing, so that a draft of the first says what it says."""
    directory = tmp_path_factory.mktemp("hollow")
    make_hollow(directory, 2, {1}, {1})
    return directory


def oracle(target: Path, after: int = 0) -> Draft:
    """Return a draft that says the token so many after what the target says."""
    draft = lm.create(lm.Params(num_layers=1), target, None)
    draft.config.tie_word_embeddings = False
    draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.detach().roll(after, 0))
    return draft


@pytest.fixture(scope="module")
def plain(tiny_target: Path) -> list[Completion]:
    return answer_all(tiny_target, None, prompts(3))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "limit"), [("lm", 0), ("lm", 1), ("eagle3", 3), ("hydra", 5)])
def test_the_output_is_that_without_a_draft(tiny_target, plain, family, limit) -> None:
    draft = make_tiny(family_named(family), tiny_target)
    found = answer_all(tiny_target, draft, prompts(3), num_draft_tokens=limit, lengths=PEARL)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert all(0 <= size <= limit for one in found for size in one.drafted)


@pytest.mark.parametrize(
    ("after", "drafted", "accepted"),
    [
        # The first new token alone, then the three that wait and the first of the next four; 23 after the prompt's own.
        (0, (1, 4, 4, 4, 4, 4, 4), (0, 3, 3, 3, 3, 3, 2)),
        (1, (1,) * 23, (0,) * 23),
    ],
)
def test_a_right_draft_is_verified_chunk_by_chunk_and_a_wrong_one_found_out_by_its_first_token(
    hollow: Path, after: int, drafted: tuple[int, ...], accepted: tuple[int, ...]
) -> None:
    (found,) = answer_all(hollow, oracle(hollow, after), prompts(1), num_draft_tokens=4, lengths=PEARL)
    assert found.token_ids == answer_all(hollow, None, prompts(1))[0].token_ids
    assert (found.drafted, found.accepted) == (drafted, accepted)


@pytest.mark.slow
def test_what_is_sampled_follows_the_target(tiny_target: Path, tiny_draft: Path) -> None:
    assert sampled_p_value(tiny_target, tiny_draft, lengths="pearl") > P_VALUE


def test_draft_and_target_run_at_once(tiny_target, tiny_draft, plain, monkeypatch) -> None:
    """Each waits in every step until the other has begun, which one after the other never would."""
    meeting, original = Barrier(2, timeout=60), Overlapped._draft_on
    target = Decoder.load(tiny_target, torch.float32)
    forward, prompt = target.forward, prompts(1)[0]

    def draft_on(self: Overlapped, number: int) -> list[tuple[int, Tensor | None]]:
        meeting.wait()
        return original(self, number)

    def read(token_ids: Tensor, cache: Cache, *rest: Any) -> tuple[Tensor, Tensor]:
        if cache.length:
            meeting.wait()
        return forward(token_ids, cache, *rest)

    monkeypatch.setattr(Overlapped, "_draft_on", draft_on)
    monkeypatch.setattr(target, "forward", read)
    draft = open_draft(tiny_draft, tiny_target)
    engine = TorchEngine(target, tiny_target, draft, None, Params(num_draft_tokens=3, lengths=PEARL))
    answer = asyncio.run(engine.generate(prompt, GREEDY, "1"))
    assert answer.token_ids == plain[0].token_ids


def test_speculation_may_be_switched_off_and_on_within_a_request(hollow: Path) -> None:
    target = Decoder.load(hollow, torch.float32)
    engine = TorchEngine(target, hollow, oracle(hollow), None, Params(num_draft_tokens=4, lengths=PEARL))
    request = Overlapped(engine, prompts(1)[0], GREEDY, "1")
    while request.finish_reason is None:
        engine.speculating = len(request.token_ids) % 5 < 3
        request.step()
    request.end()
    assert tuple(request.token_ids) == answer_all(hollow, None, prompts(1))[0].token_ids
    assert {0, 4} <= set(request.completion().drafted)


def test_drafts_that_can_not_be_overlapped_are_refused(tiny_target: Path) -> None:
    counts = np.zeros(259, np.int64)
    looks_up = ngram.create(ngram.Params(), tiny_target, counts)
    with pytest.raises(ValueError, match="pearl drafts while the target reads; Ngram can't go on from tokens that"):
        answer_all(tiny_target, looks_up, prompts(1), lengths=PEARL)
    exits = make_tiny(early_exit, tiny_target)
    with pytest.raises(ValueError, match="pearl drafts while the target reads; EarlyExit runs layers of the target"):
        answer_all(tiny_target, exits, prompts(1), lengths=PEARL)
