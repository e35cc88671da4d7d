"""What every draft family keeps: it round-trips, drafts in the engine as in training, and refuses other targets."""

import inspect
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from infra.artifacts import write_manifest
from models import catalog
from models.core.checkpoints.readout import output_embedding
from models.core.drafting.draft_families import (
    UnknownFamily,
    check_draft,
    family_named,
    family_of,
    is_trained,
    name_of,
    open_draft,
)
from models.core.drafting.drafters import Expander, Observer
from models.core.evaluation.scoring import trace
from models.core.learning.hidden import Sample
from models.drafts import Adopter, Draft, Drafter, Draw, Family, Rows
from models.losses import cross_entropy, feature_l2, feature_regression, forward_kl
from models.targets import describe
from tests.models.drafts.tiny import change_config, make_tiny, params_of, rows_at, save_tiny

NAMES = catalog.names("drafts")
K = 3
# How each family with weights is trained, and for how many steps its rows are unrolled where 2 and 12 are served.
REGRESSION, TOKENS = feature_regression.Params(classification=0.1), cross_entropy.Params()
TRAINED = {
    "chimera": (feature_l2.Params(classification=1.0), "all", 1.0, 4, 4),
    "clover": (REGRESSION, "all", 0.7, 2, 5),
    "dflash": (TOKENS, "all", math.exp(-1 / 4), 7, 7),
    "dream": (feature_regression.Params(classification=5.0), "all", 1.0, 1, 1),
    "eagle": (REGRESSION, "all", 1.0, 1, 1),
    "eagle3": (forward_kl.Params(), "accepted", 0.8, 2, 12),
    "falcon": (REGRESSION, "all", 1.0, 2, 2),
    "hydra": (TOKENS, "all", 1.0, 4, 4),
    "kangaroo": (forward_kl.Params(), "accepted", 0.8, 1, 1),
    "lm": (forward_kl.Params(), "accepted", 0.8, 1, 1),
    "medusa": (TOKENS, "all", 0.8, 4, 4),
    "parallel_eagle": (forward_kl.Params(), "all", 1.0, 2, 12),
    "prompt_tokens": (forward_kl.Params(), "all", 0.8, 4, 4),
}
FOLLOWS = {"clover", "dflash", "dream", "eagle", "eagle3", "falcon", "parallel_eagle"}  # vocabularies, the traffic


def test_a_family_offers_what_is_asked_of_it_and_an_adopter_all_of_that(family: Family) -> None:
    asked = vars(Family) | (vars(Adopter) if hasattr(family, "adopt") or hasattr(family, "publishes") else {})
    for name, member in asked.items():
        if isinstance(member, property):
            assert hasattr(family, name), name
        elif inspect.isfunction(member) and not name.startswith("_"):
            wanted = list(inspect.signature(member).parameters)[1:]
            assert list(inspect.signature(getattr(family, name)).parameters) == wanted, name
    assert family.Params.model_fields["name"].default == name_of(family)


def test_a_saved_draft_is_recognised_checked_and_loaded_again(family, saved, tiny_target, tmp_path) -> None:
    assert family_of(saved) is family
    family.check(saved, saved, describe(tiny_target))
    family.save(open_draft(saved, tiny_target), tmp_path)
    for file in saved.iterdir():
        if file.name != "manifest.json":
            assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(("num_rows", "prompt"), [(1, 9), (2, 30)])
def test_the_engines_drafting_is_the_unrolling_of_training(family, saved, tiny_target, num_rows, prompt) -> None:
    """The drafter goes through a sequence in two bites; its tokens are fed to `unroll`, which must say the same."""
    draft = open_draft(saved, tiny_target)
    rng = torch.Generator().manual_seed(num_rows)
    token_ids = torch.randint(3, 20, (prompt + num_rows + K + 2,), generator=rng)
    hidden = torch.randn(len(token_ids), len(draft.taps) * 128, generator=rng)
    drafter = draft.drafter(len(token_ids) + K)
    with torch.inference_mode():
        drafter.extend(token_ids[: prompt + 1], hidden[:prompt])
        for _ in range(2):  # what was drafted once leaves no trace
            drafter.propose(K, best_of(draft, []))
        drafter.extend(token_ids[prompt : prompt + num_rows + 1], hidden[prompt : prompt + num_rows])
        logits: list[Tensor] = []
        proposal = drafter.propose(K, best_of(draft, logits))
        proposed, parents = proposal.token_ids[0].tolist(), proposal.parents
        last = prompt + num_rows
        fed = torch.cat([token_ids[: last + 1], torch.tensor([*proposed, 0])])[None]
        rows = Rows(hidden[None, :last], fed, torch.tensor([0]), torch.tensor([last - 1]))
        if not draft.replayable:
            with pytest.raises(ValueError, match="can't be scored on answers that are there already"):
                draft.unroll(rows, K)
            return
        unrolled = draft.unroll(rows, K)
    for step, token in enumerate(proposed[node] for node in first_branch(parents)):
        running, wanted, states, *_ = unrolled[step]
        assert running.tolist() == [0]
        assert states is None or len(states) == 1
        assert int(draft.vocabulary[wanted[0].argmax()]) == token
        if logits:
            torch.testing.assert_close(logits[step], wanted[0], rtol=1e-3, atol=1e-3)


def first_branch(parents: tuple[int, ...]) -> list[int]:
    """Return the nodes on the way that goes on with the first child."""
    branch: list[int] = []
    while (last := branch[-1] if branch else -1) in parents:
        branch.append(parents.index(last))
    return branch


def best_of(draft: Draft, seen: list[Tensor]) -> Draw:
    """Draw the most likely token, from itself; the logits are noted in `seen`."""

    def draw(logits: Tensor) -> tuple[int, Tensor]:
        seen.append(logits)
        token = int(draft.vocabulary[logits.argmax()])
        return token, torch.nn.functional.one_hot(torch.tensor(token), 259).float()

    return draw


def led(draft: Draft, path: list[int], seen: list[Tensor]) -> Draw:
    """Draw the tokens of a path, whatever is likely, and then the most likely one; logits are noted in `seen`."""
    best = best_of(draft, seen)

    def draw(logits: Tensor) -> tuple[int, Tensor | None]:
        token, q = best(logits)
        return (path[len(seen) - 1] if len(seen) <= len(path) else token), q

    return draw


def drafter_with_text(draft: Draft) -> Drafter:
    """Return a drafter that has read a text in which the last tokens stood before."""
    drafter = draft.drafter(40)
    text = torch.tensor([*range(3, 15), *range(3, 9)])
    if isinstance(drafter, Observer):  # the target said that each token is followed by the next
        drafter.observe(text, torch.nn.functional.one_hot(text + 1, 259).float())
    drafter.extend(text, torch.randn(len(text) - 1, len(draft.taps) * 128, generator=torch.Generator().manual_seed(0)))
    return drafter


def test_rows_of_several_texts_are_each_drafted_as_alone_whoever_else_goes_on(family, saved, tiny_target) -> None:
    draft = open_draft(saved, tiny_target)
    if not draft.replayable:
        return
    rng, width = torch.Generator().manual_seed(0), len(draft.taps) * 128
    tokens = torch.randint(3, 12, (2, 24), generator=rng)  # few, so that what is looked up is found
    hidden, places = torch.randn(2, 20, width, generator=rng), torch.tensor([[0, 9], [0, 14], [1, 6], [1, 15]])
    with torch.inference_mode():
        packed = draft.unroll(Rows(hidden, tokens, *places.T), K, lambda step, running, logits: running != 1)
        assert all(1 not in later.running for later in packed[1:])
        for row, (sequence, index) in enumerate(places.tolist()):
            one = Rows(hidden[sequence, None], tokens[sequence, None], *torch.tensor([[0], [index]]))
            for step, (whole, alone) in enumerate(zip(packed, draft.unroll(one, K), strict=False)):
                if step == 0 or row != 1:
                    found = whole.logits[whole.running == row]
                    torch.testing.assert_close(found, alone.logits, rtol=1e-3, atol=1e-3)


def test_no_more_is_drafted_nor_counted_than_a_family_can(family, saved, tiny_target, tmp_path) -> None:
    draft = open_draft(saved, tiny_target)
    if (deepest := draft.max_depth) is None:
        return
    drafter, path = drafter_with_text(draft), list(range(3, 3 + deepest))
    with torch.inference_mode():
        assert drafter.propose(deepest + 3, best_of(draft, [])).num_tokens == deepest
        if isinstance(drafter, Expander):
            last, beyond = drafter.expand(path, list(range(-1, deepest - 1)), [deepest - 2, deepest - 1])
            assert last.exp().sum() == pytest.approx(1)
            assert torch.isneginf(beyond).all()
        assert len(draft.unroll(rows_at(4, width=len(draft.taps) * 128), deepest + 3)) == deepest
    sample = Sample("a", "d", [5, 6, 7], list(range(8, 30)))
    (told,) = trace(draft, tiny_target, [sample], deepest + 2, tmp_path)
    assert set(told.drafted) == {deepest}


def test_a_proposal_says_what_each_token_was_drawn_from(family: Family, saved: Path, tiny_target: Path) -> None:
    draft = open_draft(saved, tiny_target)
    with torch.inference_mode():
        proposal = drafter_with_text(draft).propose(K, best_of(draft, []))
    assert 1 <= proposal.num_tokens <= K
    assert proposal.token_ids.shape[0] == 1
    assert set(proposal.token_ids[0].tolist()) <= set(draft.vocabulary.tolist())
    assert proposal.q is not None or not is_trained(family)
    drawn_from = proposal.distributions(259).gather(-1, proposal.token_ids[..., None])
    assert drawn_from.flatten().tolist() == [1.0] * proposal.num_tokens


def test_a_draft_of_several_passes_stops_where_it_is_told_to(family: Family, saved: Path, tiny_target: Path) -> None:
    draft, sure, seen = open_draft(saved, tiny_target), [], []

    def go_on(confidence: float) -> bool:
        sure.append(confidence)
        return len(sure) < 2

    with torch.inference_mode():
        proposal = drafter_with_text(draft).propose(K, best_of(draft, seen), go_on)
    if seen:  # look-up takes no pass and does not ask
        assert proposal.depth == len(sure) == 2
        assert all(0 < confidence <= 1 for confidence in sure)


def test_a_family_that_expands_says_after_each_node_what_it_says_after_its_path(family, saved, tiny_target) -> None:
    draft = open_draft(saved, tiny_target)
    drafter = drafter_with_text(draft)
    assert isinstance(drafter, Expander) == draft.expands
    if not isinstance(drafter, Expander):
        return
    tokens, parents = [40, 41, 42, 43], [-1, -1, 0, 2]
    with torch.inference_mode():
        drafter.expand([], [], [-1])
        found = drafter.expand(tokens, parents, [-1, 1, 3])
        drafter.propose(K, best_of(draft, []))
        again = drafter.expand(tokens, parents, [-1, 1, 3])
        alone = torch.full_like(found, float("-inf"))
        for place, path in enumerate(([], [41], [40, 42, 43])):
            logits: list[Tensor] = []
            drafter_with_text(draft).propose(len(path) + 1, led(draft, path, logits))
            alone[place, draft.vocabulary] = logits[-1].log_softmax(-1)
    torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again, found, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def served(family: Family, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(family, tiny_target, tmp_path_factory.mktemp("served"), served=True)


def test_a_family_that_vllm_does_not_serve_says_so_in_its_place(family: Family, saved: Path, served: Path) -> None:
    vllm = catalog.load("engines", "vllm")
    require, engine = vllm.require_draft, vllm.Params(num_draft_tokens=K)
    if family.SERVED:
        require(params_of(family, served=True), engine)
        assert family.vllm_config(served)["method"]
    else:
        for refused in (lambda: require(params_of(family), engine), lambda: family.vllm_config(saved)):
            with pytest.raises(ValueError, match=f'can\'t draft with family {name_of(family)}; engine "torch" can'):
                refused()


def test_a_draft_that_vllm_can_not_compute_is_refused_by_its_params_and_by_its_directory(family, saved) -> None:
    if not hasattr(family, "require_served"):
        return
    vllm, torch_engine = catalog.load("engines", "vllm"), catalog.load("engines", "torch")
    with pytest.raises(ValueError, match=r"set .* in \[draft\]"):
        vllm.require_draft(params_of(family, refused=True), vllm.Params(num_draft_tokens=K))
    torch_engine.require_draft(params_of(family, refused=True), torch_engine.Params(num_draft_tokens=K))


def test_a_drafter_goes_on_with_other_weights(family: Family, saved: Path, tiny_target: Path) -> None:
    if not is_trained(family):
        return
    drafter = open_draft(saved, tiny_target).drafter(40)
    token_ids = torch.arange(3, 33)
    draft = make_tiny(family, tiny_target, seed=9)
    with torch.inference_mode():
        drafter.extend(token_ids[:11], torch.randn(10, len(draft.taps) * 128))
        before: list[Tensor] = []
        drafter.propose(K, best_of(draft, before))
        drafter.draft = draft
        after: list[Tensor] = []
        drafter.propose(K, best_of(draft, after))
    assert not torch.equal(before[0], after[0])


def test_a_family_is_trained_as_its_paper_says(family: Family, tiny_target: Path) -> None:
    draft = make_tiny(family, tiny_target)
    learns = any(parameter.requires_grad for parameter in draft.parameters())
    assert family.PAPER and (name_of(family) in TRAINED) == is_trained(family) == learns
    if learns:
        assert (*draft.procedure, draft.num_unrolled(2), draft.num_unrolled(12)) == TRAINED[name_of(family)]


def test_a_refresh_lets_the_vocabulary_follow_the_traffic_or_leaves_the_draft_as_it_is(
    family: Family, saved: Path, tiny_target: Path
) -> None:
    draft = open_draft(saved, tiny_target)
    before = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    counts = np.zeros(259)
    counts[100:164] = 1
    after = family.renew(draft, tiny_target, counts)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after.state_dict()[name])}
    if name_of(family) not in FOLLOWS:
        assert not changed
        return
    assert after.vocabulary.tolist() == list(range(100, 164))
    assert changed <= {"token_map", "d2t", "lm_head.weight"}
    matrix = after.output if hasattr(after, "output") else after.lm_head
    assert torch.equal(matrix.weight, output_embedding(tiny_target)[100:164])


def test_the_engine_finds_every_tensor_of_the_file_once(family: Family, served: Path) -> None:
    weights = family.vllm_weights(served)
    assert (weights is not None) == (is_trained(family) and family.SERVED)
    if weights is not None:
        parts = [part for parts in weights.parameters.values() for part in parts]
        assert sorted(parts) == sorted(load_file(weights.file))


def test_a_draft_from_before_the_family_was_written_is_loaded_and_swapped_with_new_ones(
    family: Family, saved: Path, tiny_target: Path, tmp_path: Path
) -> None:
    config = json.loads((saved / "config.json").read_text())
    change_config(saved, tmp_path, redraft={key: own for key, own in config["redraft"].items() if key != "family"})
    write_manifest(tmp_path)
    others = [one for one in map(family_named, NAMES) if one is not family]
    if any(config["architectures"][0] in one.ARCHITECTURES for one in others):
        with pytest.raises(UnknownFamily, match="have; say which it is"):
            family_of(tmp_path)
        return
    assert family_of(tmp_path) is family
    for directory, like in ((tmp_path, saved), (saved, tmp_path)):
        check_draft(directory, like, describe(tiny_target))
    again = tmp_path / "again"
    again.mkdir()
    family.save(open_draft(tmp_path, tiny_target), again)
    assert json.loads((again / "config.json").read_text()) == config
