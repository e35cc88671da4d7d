"""Drafts that are the target's first layers: `early_exit` alone, `kangaroo` with an adapter behind them."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.core.evaluation.scoring import score
from models.core.learning import distill
from models.drafts import Rows, early_exit, kangaroo
from models.targets import describe, random
from tests.models.drafts.answered import answer_all, answers_of, prompts
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
def test_an_exit_that_is_not_before_the_last_layer_is_refused(tiny_target, family, exit_layer) -> None:
    with pytest.raises(ValueError, match=f"exit_layer must be 1 to 1, before the last .* layers; got {exit_layer}"):
        family.create(family.Params(exit_layer=exit_layer), tiny_target, None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    random.build(random.Params(num_layers=3), directory)
    return directory


def test_a_new_adapter_is_the_next_layers_attention_and_says_what_the_target_without_the_rest_says(tmp_path) -> None:
    """Of the target only layer 0 and the attention of layer 1 add anything, so that all is accepted."""
    make_hollow(tmp_path, 3, {2}, {1, 2})
    draft = kangaroo.create(kangaroo.Params(exit_layer=1), tmp_path, None)
    plain = answer_all(tmp_path, None, prompts(2))
    answers = answer_all(tmp_path, draft, prompts(2), num_draft_tokens=3)
    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
    assert {one.accepted[:5] for one in answers} == {(3,) * 5}


@torch.inference_mode()
def test_rows_read_the_targets_states_of_what_is_certain_and_their_own_of_what_is_drafted(target: Path) -> None:
    """With the target's true states, every step is a place of one pass over the whole text, by the library's layer."""
    draft = kangaroo.create(kangaroo.Params(exit_layer=1), target, None)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    token_ids = torch.arange(3, 23)[None]
    model.model.layers[1].mlp.down_proj.weight.zero_()
    states = model(token_ids, output_hidden_states=True).hidden_states
    wanted = model.lm_head(model.model.norm(states[2]))[0]
    rows = Rows(states[1][:, :15], token_ids, torch.zeros(3, dtype=torch.int64), torch.tensor([4, 9, 14]))
    first, second, third = draft.unroll(rows, 3, lambda step, running, logits: running != 1)
    torch.testing.assert_close(first.logits, wanted[[5, 10, 15]], rtol=1e-3, atol=1e-3)
    assert second.running.tolist() == third.running.tolist() == [0, 2]
    torch.testing.assert_close(second.logits, wanted[[6, 16]], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(third.logits, wanted[[7, 17]], rtol=1e-3, atol=1e-3)
    other = draft.unroll(rows._replace(hidden=rows.hidden.flip(1)), 3)
    assert not torch.allclose(other[0].logits, first.logits, atol=0.1)


@pytest.mark.slow
def test_distillation_raises_acceptance(target: Path, tmp_path: Path) -> None:
    asked = prompts(16)
    samples = answers_of(target, asked)
    draft = kangaroo.create(kangaroo.Params(exit_layer=1), target, None)

    def accepted() -> int:
        return sum(one.accepted for one in score(draft, target, samples, 3, tmp_path))

    before, head = accepted(), draft.head.clone()
    params = distill.Params(num_epochs=12, batch_tokens=256, learning_rate=2e-3, num_threads=1)
    distill.train(draft, target, samples, params, 3, tmp_path)
    assert accepted() > before + 20
    assert torch.equal(draft.head, head)
    decoded = answer_all(target, draft, asked, num_draft_tokens=3)
    assert [[*one.token_ids] for one in decoded] == [one.completion_ids for one in samples]


def test_by_default_a_tenth_of_the_layers_draft_before_an_adapter(tmp_path: Path) -> None:
    random.build(random.Params(num_layers=21, num_heads=1), tmp_path)
    assert kangaroo.create(kangaroo.Params(), tmp_path, None).taps == (2,)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (early_exit, {"early_exit": {"exit_layer": 5}}, "exit_layer must be 1 to 2"),
        (kangaroo, {"exit_layer": 3}, "exit_layer must be 1 to 2"),
        (kangaroo, {"exit_layer": None}, "exit_layer must be 1 to 2, .* got None"),
        (kangaroo, {"num_hidden_layers": 9}, "has num_hidden_layers 9, the target has 3"),
        (kangaroo, {"num_attention_heads": 4}, r"tensor self_attn.q_proj.weight is .* wanted .* \[256, 128\]"),
    ],
)
def test_a_file_that_does_not_fit_the_target_is_refused(target, tmp_path, family, changes, message) -> None:
    family.save(family.create(family.Params(), target, None), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        family.check(tmp_path, None, describe(target))
