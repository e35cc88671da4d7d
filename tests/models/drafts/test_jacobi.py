from pathlib import Path

import torch
from torch import Tensor

from models.drafts import jacobi
from tests.models.drafts.answered import answer_all, prompts


def said(*tokens: int) -> Tensor:
    """[n, 10] logits by which each of these tokens is likeliest."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), 10).float()


def greedily(logits: Tensor) -> tuple[int, None]:
    return int(logits.argmax()), None


def proposed(drafter: "jacobi._Drafter", num_tokens: int) -> list[int]:
    return drafter.propose(num_tokens, greedily).token_ids[0].tolist()


def test_what_the_target_said_after_wrong_guesses_is_guessed_next(tiny_target: Path) -> None:
    drafter = jacobi.create(jacobi.Params(), tiny_target, None).drafter(20)
    drafter.observe(torch.tensor([3]), said(4))
    drafter.extend(torch.tensor([1, 2, 3, 4]), torch.zeros(3, 0))
    assert proposed(drafter, 3) == [4, 4, 4]  # no place was reached yet
    # Of 4 | 4 4 4 the target says 5 | 6 7 8: nothing is accepted, 5 is emitted.
    drafter.observe(torch.tensor([4, 4, 4, 4]), said(5, 6, 7, 8))
    drafter.extend(torch.tensor([4, 5]), torch.zeros(1, 0))
    assert proposed(drafter, 3) == [6, 7, 8]
    # Of 5 | 6 7 8 it says 6 | 9 1 2: one is accepted, 9 is emitted, and of the two places left the last is repeated.
    drafter.observe(torch.tensor([5, 6, 7, 8]), said(6, 9, 1, 2))
    drafter.extend(torch.tensor([5, 6, 9]), torch.zeros(2, 0))
    assert proposed(drafter, 3) == [1, 2, 2]


def test_a_guess_is_drawn_from_the_distribution_of_its_place(tiny_target: Path) -> None:
    drafter = jacobi.create(jacobi.Params(), tiny_target, None).drafter(20)
    drafter.observe(torch.tensor([4, 5, 6]), said(5, 6, 7))
    drafter.extend(torch.tensor([4, 9]), torch.zeros(1, 0))
    rng = torch.Generator().manual_seed(0)

    def draw(logits: Tensor) -> tuple[int, Tensor]:
        q = (3 * logits).softmax(-1)
        return int(torch.multinomial(q, 1, generator=rng)), q

    proposal = drafter.propose(2, draw)
    torch.testing.assert_close(proposal.q[0], (3 * said(6, 7)).softmax(-1))


def test_the_iteration_ends_in_the_targets_own_text_within_a_step_a_token(tiny_target: Path) -> None:
    """A fixed point of the guesses is the target's greedy text, so it never takes more steps than decoding plainly."""
    draft = jacobi.create(jacobi.Params(), tiny_target, None)
    plain = answer_all(tiny_target, None, prompts(6))
    found = answer_all(tiny_target, draft, prompts(6), num_draft_tokens=5)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert sum(len(one.drafted) for one in found) < sum(len(one.drafted) for one in plain)
