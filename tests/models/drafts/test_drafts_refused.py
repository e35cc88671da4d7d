"""What every draft family refuses: other targets, states and settings, and directories that something is wrong with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.core.drafting.draft_families import class_of, family_named, is_trained, name_of, open_draft
from models.drafts import Family
from models.targets import describe, random
from tests.models.drafts.tiny import change_config, params_of, require_refused, rows_at


def test_a_target_of_another_layout_is_refused(family: Family, tmp_path: Path) -> None:
    if class_of(family).any_layout:
        return
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ValueError, match=rf"{name_of(family)} .*(llama, mistral.*gpt2|LlamaForCausalLM.*GPT2LMHead)"):
        family.create(params_of(family), tmp_path, np.ones(259))


def test_params_that_do_not_fit_the_target_are_refused(family: Family, tiny_target: Path) -> None:
    params = params_of(family)
    for change, message in (
        ({"vocab_size": 1000}, "draft vocab_size must be 1 to 259, the target's; got 1000"),
        ({"mask_token_id": 259}, "the mask must be a token of 0 to 258, the target's; got 259"),
    ):
        if change.keys() <= type(params).model_fields.keys():
            with pytest.raises(ValueError, match=message):
                family.create(params.model_copy(update=change), tiny_target, np.ones(259))


def test_states_of_another_width_are_refused(family: Family, saved: Path, tiny_target: Path) -> None:
    draft = open_draft(saved, tiny_target)
    width = len(draft.taps) * 128
    if width:
        with pytest.raises(ValueError, match=f"after layers .* {width} wide; got states of width {width - 1}"):
            draft.unroll(rows_at(4, width=width - 1), 1)


def test_a_draft_for_another_target_is_refused(family: Family, saved: Path, tiny_target: Path, tmp_path: Path) -> None:
    random.build(random.Params(seed=1), tmp_path)
    with pytest.raises(ValueError, match="was made for target_sha256"):
        family.check(saved, None, describe(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Nobody"]}, r"is of architecture \['Nobody'\]; wanted "),
        ({"redraft": {"tokenizer_sha256": "1" * 64}}, "made for tokenizer_sha256 111111111111"),
        ({"vocab_size": 7}, "vocab_size 7, the target has 259"),
        ({"hidden_size": 64}, "hidden_size( 64, the target has 128|; a swap can't change it)"),
        ({"rms_norm_eps": 1.0}, "differs from the served draft in rms_norm_eps"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(family, saved, tiny_target, tmp_path, change, message) -> None:
    if change.keys() == {"hidden_size"} and "hidden_size" not in json.loads((saved / "config.json").read_text()):
        return
    change_config(saved, tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        family.check(tmp_path, saved, describe(tiny_target))


@pytest.mark.parametrize("wrong", [0, "2", None])
@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(("chimera", "num_heads"), ("clover", "num_heads"), ("eagle", "draft_vocab_size"), ("eagle3", "head_dim")),
        *(("falcon", "tokens_per_pass"), ("hydra", "num_heads"), ("medusa", "truncated_vocab_size")),
    ],
)
def test_a_size_that_is_none_is_refused(name: str, size: str, wrong: object, tiny_target: Path, tmp_path: Path) -> None:
    message = f"draft changed has {size} {wrong!r}; wanted a number from 1"
    require_refused(family_named(name), tiny_target, tmp_path, message, **{size: wrong})


def test_a_spoilt_file_is_refused_by_the_name_of_what_is_wrong(family, saved, tiny_target, tmp_path) -> None:
    if not is_trained(family):
        return
    change_config(saved, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = min(key for key, tensor in tensors.items() if tensor.is_floating_point())
    faults = [
        (f"tensor {name} holds NaN", {name: tensors[name] * float("nan")}),
        ("tensor surprise is not one of this draft's", {"surprise": torch.zeros(1)}),
        (rf"tensor {name} is .*\[1\]; wanted", {name: tensors[name].flatten()[:1].clone()}),
        (f"tensor {name} is torch.float64", {name: tensors[name].double()}),
        (f"tensor {name} is missing", {name: None}),
    ]
    for tokens in {"token_map", "d2t"} & tensors.keys():
        outside, twice = tensors[tokens].clone(), tensors[tokens].clone()
        outside[-1], twice[1] = 10_000, twice[0] - int(tokens == "d2t")
        faults += [(f"{tokens} must name ascending tokens of 0 to 258", {tokens: wrong}) for wrong in (outside, twice)]
    for message, wrong in faults:
        file.unlink()  # which may be mapped into memory
        save_file({key: tensor for key, tensor in (tensors | wrong).items() if tensor is not None}, file)
        with pytest.raises(ValueError, match=message):
            family.check(tmp_path, saved, describe(tiny_target))
    file.write_bytes((saved / file.name).read_bytes()[:2000])
    with pytest.raises(ValueError, match="not a safetensors file"):
        family.check(tmp_path, None, describe(tiny_target))
