"""What every draft family keeps: it round-trips, drafts in the engine as in training, and refuses other targets."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from infra.manifest import write_manifest
from models import catalog
from models.drafts import Draft, Rows, family_of, open_draft
from models.targets import describe, random
from tests.conftest import shake

NAMES = catalog.names("drafts")
# What the two-layer target of 259 tokens is too small for otherwise.
SMALL = {"eagle3": {"vocab_size": 64}, "lm": {"num_layers": 1}}
K = 3


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest) -> ModuleType:
    return catalog.load("drafts", request.param)


def make(family: ModuleType, target: Path, seed: int = 0) -> Draft:
    counts = np.zeros(259)
    counts[3:67] = 1
    params = family.Params(**SMALL.get(family.__name__.rpartition(".")[2], {}))
    draft: Draft = family.create(params, target, counts)
    shake(draft, 0.02, seed)
    return draft


@pytest.fixture(scope="module")
def saved(family: ModuleType, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    family.save(make(family, tiny_target), directory)
    write_manifest(directory)
    return directory


def test_a_saved_draft_is_recognised_checked_and_loaded_again(
    family: ModuleType, saved: Path, tiny_target: Path, tmp_path: Path
) -> None:
    assert family_of(saved) is family
    family.check(saved, saved, describe(tiny_target))
    family.save(open_draft(saved, tiny_target), tmp_path)
    for file in saved.iterdir():
        if file.name != "manifest.json":
            assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(("num_rows", "prompt"), [(1, 9), (2, 30)])
def test_the_engines_drafting_is_the_unrolling_of_training(
    family: ModuleType, saved: Path, tiny_target: Path, num_rows: int, prompt: int
) -> None:
    """The drafter goes through a sequence in two bites; its tokens are fed to `unroll`, which must say the same."""
    draft = open_draft(saved, tiny_target)
    rng = torch.Generator().manual_seed(num_rows)
    token_ids = torch.randint(3, 20, (prompt + num_rows + K + 2,), generator=rng)
    hidden = torch.randn(len(token_ids), len(draft.taps) * 128, generator=rng)
    drafter = draft.drafter(len(token_ids) + K)
    with torch.inference_mode():
        drafter.extend(token_ids[: prompt + 1], hidden[:prompt])
        for _ in range(2):  # what was drafted once leaves no trace
            drafter.propose(K, lambda logits: int(logits.argmax()))
        drafter.extend(token_ids[prompt : prompt + num_rows + 1], hidden[prompt : prompt + num_rows])
        proposed, logits = drafter.propose(K, lambda row: int(row.argmax()))
        last = prompt + num_rows
        fed = torch.cat([token_ids[: last + 1], torch.tensor([*proposed, 0])])[None]
        rows = Rows(hidden[None, :last], fed, torch.tensor([0]), torch.tensor([last - 1]))
        unrolled = draft.unroll(rows, K)
    for step, token in enumerate(proposed):
        running, wanted = unrolled[step]
        assert running.tolist() == [0]
        assert int(draft.vocabulary[wanted[0].argmax()]) == token
        if logits is not None:
            torch.testing.assert_close(logits[step], wanted[0], rtol=1e-3, atol=1e-3)


def test_a_drafter_goes_on_with_other_weights(family: ModuleType, saved: Path, tiny_target: Path) -> None:
    if not family.TRAINED:
        return
    drafter = open_draft(saved, tiny_target).drafter(40)
    token_ids = torch.arange(3, 33)
    draft = make(family, tiny_target, seed=9)
    with torch.inference_mode():
        drafter.extend(token_ids[:11], torch.randn(10, len(draft.taps) * 128))
        _, before = drafter.propose(K, lambda logits: 0)
        drafter.draft = draft
        _, after = drafter.propose(K, lambda logits: 0)
    assert before is not None
    assert after is not None
    assert not torch.equal(before, after)


def test_only_what_learns_needs_a_gradient(family: ModuleType, tiny_target: Path) -> None:
    draft = make(family, tiny_target)
    assert any(parameter.requires_grad for parameter in draft.parameters()) == family.TRAINED
    assert family.PAPER


def test_a_draft_for_another_target_is_refused(
    family: ModuleType, saved: Path, tiny_target: Path, tmp_path: Path
) -> None:
    random.build(random.Params(seed=1), tmp_path)
    with pytest.raises(ValueError, match="was made for target_sha256"):
        family.check(saved, None, describe(tmp_path))


def test_a_draft_of_another_vocabulary_is_refused(
    family: ModuleType, saved: Path, tiny_target: Path, tmp_path: Path
) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    with pytest.raises(ValueError, match="vocab_size 7, the target has 259"):
        family.check(tmp_path, None, describe(tiny_target))


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nobody"]}')
    with pytest.raises(ValueError, match="architecture \\['Nobody'\\]; there are: .*LlamaForCausalLMEagle3"):
        family_of(tmp_path)
