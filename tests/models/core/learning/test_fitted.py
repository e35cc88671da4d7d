import asyncio
import json
from pathlib import Path

import pytest
import torch

from models.core.drafting.draft_families import family_named
from models.core.layers.decoder import Cache, Decoder
from models.core.learning import binary_head, distill, fitted
from models.core.learning.hidden import Sample
from models.drafts import Draft
from models.engines.torch import Params as EngineParams
from models.engines.torch import TorchEngine
from models.lengths import specdec_pp
from models.params import validate
from models.verify import judge
from tests.models.drafts.answered import answers_of, prompts
from tests.models.drafts.tiny import make_tiny

MARKS = [{"token_ids": list(range(3, 43)), "good": {str(place): place % 2 == 0 for place in range(40)}}] * 3


@pytest.fixture(scope="module")
def draft(tiny_target: Path) -> Draft:
    return make_tiny(family_named("lm"), tiny_target)


@pytest.fixture(scope="module")
def directory(tiny_target: Path, draft: Draft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft's, with both heads."""
    folder, samples = tmp_path_factory.mktemp("fitted"), answers_of(tiny_target, prompts(4))
    (folder / "marks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in MARKS))
    params = distill.Params(lengths=specdec_pp.Params(), verify=judge.Params(marks=folder / "marks.jsonl"))
    (folder / "draft").mkdir()
    family_named("lm").save(draft, folder / "draft")
    fitted.fit(params.heads, draft, tiny_target, samples, 3, folder / "draft", folder / "work", 0)
    return folder / "draft"


def test_heads_lie_in_a_folder_of_their_own_and_the_draft_loads_as_ever(directory: Path, tiny_target: Path) -> None:
    assert {file.name for file in (directory / fitted.FOLDER).iterdir()} == {specdec_pp.FILE, judge.FILE}
    assert not {specdec_pp.FILE, judge.FILE} & {file.name for file in directory.iterdir()}
    family_named("lm").load(directory, tiny_target)


def test_an_engine_finds_the_heads_of_its_draft(
    directory: Path, tiny_target: Path, draft: Draft, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    family_named("lm").save(draft, bare)
    params = EngineParams(lengths={"name": "specdec_pp"}, verify_greedy={"name": "judge"}, num_draft_tokens=3)
    engine = TorchEngine(Decoder.load(tiny_target, torch.float32), tiny_target, draft, directory, params)
    assert engine.lengths[1].head == directory / fitted.FOLDER / specdec_pp.FILE
    assert engine.rules[True][1].head == directory / fitted.FOLDER / judge.FILE
    asyncio.run(engine.swap_draft(bare, "bare"))
    assert engine.lengths[1].head is None and engine.rules[True][1].head is None
    own = specdec_pp.Params(head=tmp_path / "mine")  # what settings name comes first
    assert fitted.found("lengths", own, directory) is own


def test_one_answer_in_eight_is_kept_from_the_draft_and_none_without_heads() -> None:
    samples = [Sample(str(number), "chat", [3], [4, 5, 6]) for number in range(20)]
    methods = distill.Params(lengths=specdec_pp.Params()).heads
    learnt, kept = fitted.share(samples, methods)
    assert [sample.id for sample in kept] == ["7", "15"] and len(learnt) == 18
    assert fitted.share(samples, []) == (samples, [])
    with pytest.raises(ValueError, match="one answer in 8 that its draft never learns; got 7"):
        fitted.share(samples[:7], methods)


def test_what_the_head_of_judge_learns_is_what_was_marked(directory: Path, tiny_target: Path) -> None:
    decoder, text = Decoder.load(tiny_target, torch.float32), torch.tensor(MARKS[0]["token_ids"])
    states, _ = decoder.forward(text, Cache(decoder, len(text)))
    told = binary_head.load(directory / fitted.FOLDER / judge.FILE, states.shape[1])(states).sigmoid() > 0.5
    assert float((told == torch.tensor([place % 2 == 0 for place in range(40)])).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lengths": {"name": "goodput"}}, "lengths goodput has no head that could be fit"),
        ({"verify": {"name": "greedy"}}, "verify greedy has no head that could be fit"),
        ({"lengths": {"name": "specdec_pp", "threshold": 0.4}}, 'key "threshold" would do nothing, since fitting'),
        ({"verify": {"name": "judge"}}, "verify judge is fit to marked texts; name their file as marks"),
    ],
)
def test_a_recipe_that_no_head_can_be_fit_by_is_refused_when_it_is_read(keys: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        validate(distill.Params, keys, "distill")


def test_marks_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "marks.jsonl").write_text('{"token_ids": [5]}\n')
    for name in ("marks", "none"):
        with pytest.raises(ValueError, match="holds no marked texts such as"):
            judge.read_marks(tmp_path / f"{name}.jsonl")
