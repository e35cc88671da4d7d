import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.core.evaluation.likeness import accepted, fits, likeness
from models.drafts import lm
from models.quantize import int8_dynamic

DOCUMENTS = torch.randint(3, 259, (6, 24), generator=torch.Generator().manual_seed(0)).tolist()
DOCUMENTS[2] = DOCUMENTS[2][:9]


def change(model: PreTrainedModel) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    changed.model.layers[0].mlp.up_proj.weight.data *= 4
    return changed


def test_a_model_is_its_target_and_a_changed_one_is_measured_token_by_token(model: PreTrainedModel) -> None:
    assert [one[:2] for one in likeness(model, model, DOCUMENTS)] == [(0, 1)] * len(DOCUMENTS)
    changed = change(model)
    found = likeness(changed, model, DOCUMENTS, batch_size=2)
    for document, one_found in zip(DOCUMENTS, found, strict=True):
        with torch.no_grad():
            p, q = (one(torch.tensor([document])).logits[0, :-1].double().softmax(-1) for one in (model, changed))
        assert one_found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
        assert one_found.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
        assert one_found.num_tokens == len(document) - 1
    with pytest.raises(ValueError, match="none of 1 documents has two tokens"):
        likeness(model, model, [[3]])


def test_a_draft_that_is_the_target_is_accepted_whole_less_by_another(model: PreTrainedModel, tmp_path: Path) -> None:
    draft, prompts = lm.Lm(copy.deepcopy(model)), [document[:8] for document in DOCUMENTS]

    def tau(one: PreTrainedModel, name: str) -> float:
        scores = accepted(draft, one, prompts, 2, 13, tmp_path / name)
        return 1 + sum(score.accepted for score in scores) / sum(score.steps for score in scores)

    # 13 tokens: the first comes from the prompt, then 4 steps of 3.
    assert tau(model, "own") == pytest.approx(3, rel=1e-6)
    assert 1 <= tau(change(model), "changed") < 2.9
    quantized = int8_dynamic.quantize(copy.deepcopy(model), [], int8_dynamic.Params()).model
    assert tau(quantized, "quantized") > 2.5
    other = change(model)
    assert fits(other, model)
    other.config.num_hidden_layers = 1
    assert not fits(other, model)
    with pytest.raises(ValueError, match=r"prompts must be of one length; got \[3, 8\]"):
        accepted(draft, model, [*prompts, [5, 6, 7]], 2, 13, tmp_path / "odd")
