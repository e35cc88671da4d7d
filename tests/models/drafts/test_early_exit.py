import json
from pathlib import Path

import pytest

from models.drafts import early_exit, self_skip
from models.targets import describe, random
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
def test_an_exit_that_is_not_before_the_last_layer_is_refused(tiny_target: Path, exit_layer: int) -> None:
    with pytest.raises(ValueError, match=f"exit_layer must be 1 to 1, before the last .* layers; got {exit_layer}"):
        early_exit.create(early_exit.Params(exit_layer=exit_layer), tiny_target, None)


def test_an_exit_that_a_file_moved_behind_the_target_is_refused_with_its_draft(
    tiny_target: Path, tmp_path: Path
) -> None:
    early_exit.save(early_exit.create(early_exit.Params(), tiny_target, None), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"early_exit": {"exit_layer": 5}}))
    with pytest.raises(ValueError, match=f"draft {tmp_path.name}: exit_layer must be 1 to 1"):
        early_exit.load(tmp_path, tiny_target)


@pytest.mark.parametrize("family", [early_exit, self_skip])
def test_a_target_of_another_layout_is_refused(tiny_target: Path, tmp_path: Path, family) -> None:
    config = json.loads((tiny_target / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="takes targets of llama, mistral, qwen2, qwen3; got gpt2"):
        family.create(family.Params(), tmp_path, None)


def test_another_exit_can_not_be_swapped_in(tmp_path: Path) -> None:
    random.build(random.Params(num_layers=3), tmp_path)
    drafts = [tmp_path / "1", tmp_path / "2"]
    for directory in drafts:
        directory.mkdir()
        draft = early_exit.create(early_exit.Params(exit_layer=int(directory.name)), tmp_path, None)
        early_exit.save(draft, directory)
    with pytest.raises(ValueError, match="differs from the served draft in early_exit; a swap can't change it"):
        early_exit.check(drafts[0], drafts[1], describe(tmp_path))
