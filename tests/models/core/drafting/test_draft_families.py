from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.core.drafting.draft_families import (
    UnknownFamily,
    adopter_of,
    check_draft,
    family_named,
    family_of,
    name_of,
    read_vocabulary,
)
from models.drafts import lm, ngram
from models.targets import describe
from tests.models.drafts.tiny import change_config, save_tiny


def test_two_families_may_share_an_architecture_and_only_the_key_tells_them_apart(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, shared = (tmp_path / name for name in ("own", "shared"))
    save_tiny(family_named("lm"), tiny_target, own)
    monkeypatch.setattr(ngram, "ARCHITECTURES", (*ngram.ARCHITECTURES, *lm.ARCHITECTURES))
    assert family_of(own) is family_named("lm")
    change_config(own, shared, redraft={})
    with pytest.raises(
        UnknownFamily, match=r'which the families lm and ngram .*have; say .* "redraft": {"family": "lm"}'
    ):
        family_of(shared)
    change_config(own, shared, redraft={"family": "ngram"})
    with pytest.raises(ValueError, match=r"draft shared is of family ngram, the served draft of lm"):
        check_draft(shared, own, describe(tiny_target))
    with pytest.raises(ValueError, match=r"draft shared is of family 'ngram'; wanted 'lm'"):
        lm.check(shared, None, describe(tiny_target))


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ('{"architectures": ["Nobody"]}', ValueError, "architecture .*Nobody.*; there are: .*LlamaForCausalLMEagle3"),
        ('{"redraft": {"family": 5}, "architectures": ["NgramDraft"]}', UnknownFamily, "is of family 5; there are: "),
        ('{"redraft": {"family": "ngrams"}}', UnknownFamily, r"is of family 'ngrams' \(did you mean \"ngram\"\?\)"),
        ('{"redraft": [], "architectures": ["NgramDraft"]}', ValueError, r"redraft \[\]; wanted an object"),
    ],
)
def test_a_draft_of_no_family_is_refused(tmp_path: Path, config: str, kind: type[ValueError], message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(kind, match=message) as refused:
        family_of(tmp_path)
    assert type(refused.value) is kind


def test_a_published_draft_finds_the_family_that_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"speculators_model_type": "eagle3"}')
    assert name_of(adopter_of(tmp_path)) == "eagle3"
    file.write_text('{"architectures": ["MedusaModel"]}')
    with pytest.raises(ValueError, match=r"layout of no family; wanted one of: eagle3"):
        adopter_of(tmp_path)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"d2t": torch.tensor([1, 1, 4])}, {1, 2, 6}),
        ({"token_map": torch.tensor([3, 5])}, {3, 5}),
        ({"fc.weight": torch.zeros(1)}, None),
    ],
)
def test_a_drafts_vocabulary_is_read_off_its_files(tmp_path: Path, tensors: dict, found: set[int] | None) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_vocabulary(tmp_path) == found
