import json
import re
from pathlib import Path

import pytest
import torch

from models.core.layers.decoder import Cache, Decoder, Sublayers
from models.drafts import self_skip
from models.drafts.self_skip import Times, find, num_accepted
from models.targets import describe, random
from tests.models.drafts.answered import answer_all, prompts
from tests.models.drafts.hollow import make_hollow
from tests.models.engines.sampled import P_VALUE, sampled_p_value

HOLLOW = {"attention": {1}, "mlp": {2}}  # of four layers


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    make_hollow(directory, 4, **HOLLOW)
    return directory


def make(target: Path, **params: object) -> self_skip.SelfSkip:
    draft = self_skip.create(self_skip.Params(**params), target, None)
    assert isinstance(draft, self_skip.SelfSkip)
    return draft


def test_as_it_comes_every_second_layer_is_skipped_but_for_the_first_and_the_last(tmp_path: Path) -> None:
    for num_layers, wanted in ((2, {1}), (3, {1}), (4, {1}), (7, {1, 3, 5})):
        random.build(random.Params(num_layers=num_layers), tmp_path)
        assert make(tmp_path).skipped == Sublayers(frozenset(wanted), frozenset(wanted))


def test_the_search_counts_what_the_engine_accepts(tmp_path: Path) -> None:
    random.build(random.Params(num_layers=4), tmp_path)
    draft = make(tmp_path, skip_attention=[2], skip_mlp=[1])
    [prompt] = prompts(1)
    [answer] = answer_all(tmp_path, draft, [prompt], num_draft_tokens=3)
    target = Decoder.load(tmp_path, torch.float32)
    token_ids = torch.tensor([*prompt, *answer.token_ids])
    cache = Cache(target, len(token_ids) + 3 * len(answer.token_ids))
    with torch.inference_mode():
        target.forward(token_ids, cache)
        steps = num_accepted(target, token_ids, len(prompt), cache, draft.skipped, 3)
    assert tuple(steps) == answer.accepted
    assert 0 < sum(steps) < 3 * len(steps)


@pytest.mark.slow
def test_a_build_finds_the_part_that_is_worth_most(target: Path) -> None:
    answers = [(one.prompt_ids, one.token_ids) for one in answer_all(target, None, prompts(2))]
    draft, told = make(target, num_trials=12), []
    self_skip.search(draft, answers, 4, 0, lambda *progress: told.append(progress))
    assert (len(told), told[-1][:2]) == (12, (12, 12))
    assert re.fullmatch(r"[0-9.]+ tokens/s expected of the best, [0-9.]+ without a draft", told[-1][2])
    accepted = [one.accepted for one in answer_all(target, draft, prompts(2), num_draft_tokens=4)]
    first = [one.accepted for one in answer_all(target, make(target), prompts(2), num_draft_tokens=4)]
    assert sum(map(sum, accepted)) / sum(map(len, accepted)) > sum(map(sum, first)) / sum(map(len, first))
    self_skip.search(unchanged := make(target, num_trials=0), [], 4, 0)
    assert unchanged.skipped == make(target).skipped


def test_a_step_takes_what_runs() -> None:
    times = Times(attention=2.0, mlp=3.0, rest=5.0, target=100.0, plain=90.0)
    assert times.step(Sublayers(frozenset({1}), frozenset({1, 2})), 4, 2) == 2 * (3 * 2 + 2 * 3 + 5) + 100


def test_answers_that_are_too_short_to_search_on_are_refused(target: Path) -> None:
    with pytest.raises(ValueError, match="searches on answers of at least 2 tokens; none of the 2 has as many"):
        decoder = Decoder.load(target, torch.float32)
        find(make(target), decoder, [([3], [4]), ([3], [])], 3, 5, torch.Generator())


@pytest.mark.slow
def test_while_requests_are_decoded_a_better_part_is_found_and_the_output_stays(target: Path) -> None:
    draft = make(target, on_the_fly=True, skip_share=0.5, window=8, bayes_every=3)
    asked = prompts(4)
    answers = answer_all(target, draft, asked, num_draft_tokens=3)
    assert [one.token_ids for one in answers] == [one.token_ids for one in answer_all(target, None, asked)]
    assert draft.skipped == Sublayers(frozenset({1}), frozenset({2}))
    assert sum(answers[0].accepted[:3]) < 9
    assert answers[-1].accepted[:5] == (3,) * 5


def test_nothing_is_tried_before_enough_was_said_and_after_much_was_in_vain(target: Path) -> None:
    early = make(target, on_the_fly=True, window=24)
    answer_all(target, early, prompts(1), num_draft_tokens=3)
    assert early.tuning._search.tried == []
    late = make(target, on_the_fly=True, skip_share=0.5, window=4, patience=2, enough=1.0)
    late.tuning.note(frozenset({0}), 0.0, better=False)
    late.tuning.note(frozenset({0}), 0.0, better=False)
    answer_all(target, late, prompts(1), num_draft_tokens=3)
    assert len(late.tuning._search.tried) == 2


@pytest.mark.slow
def test_sampled_tokens_follow_the_target_while_parts_are_tried(tiny_target: Path) -> None:
    draft = make(tiny_target, on_the_fly=True, window=4, skip_share=0.5)
    assert sampled_p_value(tiny_target, draft) > P_VALUE
    assert draft.tuning._search.tried


def test_what_was_found_is_saved_and_can_be_swapped_in(target: Path, tmp_path: Path) -> None:
    draft, found = make(target), Sublayers(frozenset({2}), frozenset({1, 2}))
    served, saved = (tmp_path / name for name in ("served", "saved"))
    for directory in (served, saved):
        directory.mkdir()
        self_skip.save(draft, directory)
        draft.skip(found)
    assert self_skip.load(saved, target).skipped == found
    self_skip.check(saved, served, describe(target))
    assert json.loads((saved / "config.json").read_text())["redraft"]["skipped"] == {"attention": [2], "mlp": [1, 2]}


@pytest.mark.parametrize(
    ("skipped", "message"),
    [
        ({"attention": [9], "mlp": []}, "attention of layer 9 can't be skipped; the target has layers 0 to 3"),
        ({"attention": [0, 1, 2, 3], "mlp": [0, 1, 2, 3]}, "8 sublayers are skipped; wanted 1 to 7"),
        ({"attention": [True], "mlp": []}, "must hold lists of layers, attention and mlp"),
        ([1], "must hold lists of layers"),
    ],
)
def test_a_file_that_skips_what_can_not_be_skipped_is_refused(target, tmp_path, skipped, message) -> None:
    self_skip.save(make(target), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["redraft"]["skipped"] = skipped
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"draft {tmp_path.name}: .*{message}"):
        self_skip.check(tmp_path, None, describe(target))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"skip_attention": [4]}, "attention of layer 4 can't be skipped"),
        ({"skip_mlp": [-1]}, "mlp of layer -1 can't be skipped"),
        ({"skip_mlp": []}, "0 sublayers are skipped"),
        ({"skip_attention": range(4), "skip_mlp": range(4)}, "8 sublayers are skipped"),
    ],
)
def test_layers_that_can_not_be_skipped_are_refused(target: Path, params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(target, **params)


def test_a_target_of_one_layer_is_refused(tmp_path: Path) -> None:
    random.build(random.Params(num_layers=1), tmp_path)
    with pytest.raises(ValueError, match="takes targets of at least 2 layers; got 1"):
        make(tmp_path)
