import json
from pathlib import Path
from types import ModuleType

import pytest

from models.drafts import early_exit, kangaroo
from models.targets import random
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.hollow import make_hollow


@pytest.mark.slow
def test_a_target_that_is_done_at_the_exit_accepts_all_and_one_layer_less_does_not(tmp_path: Path) -> None:
    make_hollow(tmp_path, 4, {2, 3}, {2, 3})
    plain = answer_all(tmp_path, None, prompts(2))
    for exit_layer, all_right in ((3, True), (2, True), (1, False)):
        draft = early_exit.create(early_exit.Params(exit_layer=exit_layer), tmp_path, None)
        answers = answer_all(tmp_path, draft, prompts(2), num_draft_tokens=4)
        assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
        accepted, drafted = (sum(sum(getattr(one, which)) for one in answers) for which in ("accepted", "drafted"))
        # The answer's end cuts off what was right.
        assert (accepted > drafted - 10) == all_right


def test_by_default_a_quarter_of_the_layers_draft_and_the_file_says_which(tmp_path: Path) -> None:
    random.build(random.Params(num_layers=9), tmp_path)
    draft = early_exit.create(early_exit.Params(), tmp_path, None)
    assert draft.skipped.attention == draft.skipped.mlp == frozenset(range(2, 9))
    saved = tmp_path / "draft"
    saved.mkdir()
    early_exit.save(draft, saved)
    assert json.loads((saved / "config.json").read_text())["early_exit"]["exit_layer"] == 2
    assert [file.name for file in saved.iterdir()] == ["config.json"]


@pytest.mark.parametrize("exit_layer", [2, 7])
@pytest.mark.parametrize("family", [early_exit, kangaroo])
def test_an_exit_that_is_not_before_the_last_layer_is_refused(
    tiny_target: Path, family: ModuleType, exit_layer: int
) -> None:
    with pytest.raises(ValueError, match=f"exit_layer must be 1 to 1, before the last .* layers; got {exit_layer}"):
        family.create(family.Params(exit_layer=exit_layer), tiny_target, None)


def test_an_exit_that_a_file_moved_behind_the_target_is_refused_with_its_draft(
    tiny_target: Path, tmp_path: Path
) -> None:
    early_exit.save(early_exit.create(early_exit.Params(), tiny_target, None), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"early_exit": {"exit_layer": 5}}))
    with pytest.raises(ValueError, match=f"draft {tmp_path.name}: exit_layer must be 1 to 1"):
        early_exit.load(tmp_path, tiny_target)
