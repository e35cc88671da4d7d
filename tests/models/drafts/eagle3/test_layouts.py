"""Published heads: both layouts say the same, the engine reads them as we do, and what does not fit is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.drafts import eagle3
from models.drafts.eagle3.layouts import TAPS, read_published
from tests.models.published import Change, in_speculators_layout, published

Write = Callable[..., Path]


@pytest.fixture(params=["native", "speculators"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def write(layout: str, tiny_draft: Path, tiny_target: Path, tmp_path: Path) -> Write:
    """Return what writes the tiny draft in the layout, after a change to its config and tensors."""

    def make(change: Change = lambda config, tensors: None) -> Path:
        return published(tiny_draft, tiny_target, tmp_path / "published", layout, change)

    return make


def at(layout: str, name: str) -> str:
    return name.replace("midlayer.", "layers.0.") if layout == "speculators" else name


def absolute(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Let the map hold the target's ids, which the mask tells."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


@pytest.mark.parametrize("change", [lambda config, tensors: None, absolute], ids=["as it is", "ids"])
def test_a_head_of_ours_in_either_layout_comes_back_bit_by_bit(
    write: Write, tiny_draft: Path, tiny_target: Path, tmp_path: Path, change: Change
) -> None:
    eagle3.save(eagle3.adopt(write(change), tiny_target), tmp_path)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (tiny_draft / name).read_bytes(), name


def test_weights_in_32_bits_are_rounded_to_bfloat16(write: Write, tiny_draft: Path, tiny_target: Path) -> None:
    def widen(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}

    adopted = eagle3.adopt(write(widen), tiny_target).state_dict()
    for name, tensor in load_file(tiny_draft / "model.safetensors").items():
        assert torch.equal(adopted[name], tensor.to(adopted[name].dtype)), name


def test_named_taps_are_kept_in_the_order_that_the_engine_feeds_them(write: Write, tiny_target: Path) -> None:
    def reverse(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config[TAPS] = [2, 0]
        config.pop("eagle_config", None)
        tensors["fc.weight"] = torch.randn(128, 256)

    assert eagle3.adopt(write(reverse), tiny_target).taps == (0, 2)


NATIVE_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": 8,
    "vocab_size": 9,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_attention_heads": 1,
}


def readings_of(num_layers: int = 32, num_taps: int = 3, **named: object) -> tuple[tuple[int, ...], ...]:
    tensors = {"fc.weight": torch.zeros(4, 4 * num_taps)}
    return read_published({**NATIVE_CONFIG, **named}, tensors, num_layers).readings


def test_a_head_without_named_taps_may_read_the_usual_ones_the_engines_default_first() -> None:
    assert readings_of() == ((2, 16, 29), (3, 17, 30), (1, 15, 28), (10, 21, 32))
    assert readings_of(num_taps=5)[0] == (2, 9, 16, 22, 29)
    assert all(len(taps) == 2 for taps in readings_of(2, 2))
    assert readings_of(2, 2)[-1] == (1, 2)
    with pytest.raises(ValueError, match=r"names none, so the engine would take \[2, 0, -2\]; wanted .* 0 to 1"):
        readings_of(1)


def test_taps_are_read_under_each_key_in_use() -> None:
    assert readings_of(**{TAPS: [1, 15, 28]}) == ((1, 15, 28),)
    assert readings_of(aux_hidden_state_layer_ids=[1, 15, 28]) == ((1, 15, 28),)
    assert readings_of(target_layer_ids=[0, 14, 27]) == ((1, 15, 28),)  # named by whose output is read
    for key in (TAPS, "layer_ids"):  # vLLM reads these as they are, SGLang as those whose output is read
        assert readings_of(eagle_config={key: [1, 15, 28]}) == ((1, 15, 28), (2, 16, 29))
    assert readings_of(**{TAPS: [2, 16, 29]}, eagle_config={TAPS: [1, 15, 28]}) == ((2, 16, 29),)
    assert readings_of(eagle_config={TAPS: []}) == readings_of()


def test_taps_that_are_named_twice_and_differ_are_refused() -> None:
    with pytest.raises(ValueError, match=r"names different layers, .* \[1, 15, 28\], target_layer_ids \[2, 16, 29\]"):
        readings_of(**{TAPS: [1, 15, 28]}, target_layer_ids=[1, 15, 28])
    with pytest.raises(ValueError, match="names different layers"):
        readings_of(**{TAPS: [1, 15, 28]}, eagle_config={TAPS: [2, 16, 29]})
    with pytest.raises(ValueError, match="wanted a list of numbers"):
        readings_of(**{TAPS: "1,2,3"})


@pytest.mark.parametrize("said", [True, False, None])
def test_a_silent_speculators_head_norms_before_the_residual_and_a_native_one_after(
    write: Write, layout: str, tiny_target: Path, said: bool | None
) -> None:
    def say(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.pop("norm_before_residual", None)
        if said is not None:
            config["norm_before_residual"] = said

    wanted = said if said is not None else layout == "speculators"
    assert eagle3.adopt(write(say), tiny_target).norm_before_residual == wanted


def test_a_speculators_config_is_read_as_the_engine_reads_it(tiny_draft: Path, tiny_target: Path) -> None:
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    config = json.loads((tiny_draft / "config.json").read_text())
    tensors = load_file(tiny_draft / "model.safetensors")
    rewritten, _ = in_speculators_layout(config, tensors, torch.zeros(1))
    del rewritten["norm_before_residual"]
    ours = read_published(rewritten, {}, 2)
    theirs = SpeculatorsConfig.extract_transformers_pre_trained_config(rewritten)
    assert [list(taps) for taps in ours.readings] == [theirs[TAPS]]
    assert ours.norm_before_residual == theirs["norm_before_residual"]
    assert ours.draft_vocab_size == theirs["draft_vocab_size"]
    assert ours.layer.intermediate_size == theirs["intermediate_size"]
    assert not theirs["norm_before_fc"]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda tensors, at: tensors.pop(at("midlayer.mlp.up_proj.weight")), r"midlayer.mlp.up_proj.weight is missing"),
        (lambda tensors, at: tensors.pop("d2t"), "d2t is missing"),
        (
            lambda tensors, at: tensors.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}),
            "layers.1.mlp.up_proj.weight is not one of this draft's",
        ),
        (lambda tensors, at: tensors["d2t"].fill_(300), "d2t names 64, 0 of them if it holds offsets"),
        (lambda tensors, at: tensors["t2d"][70:80].fill_(True), "contradict each other: t2d marks 74 tokens"),
        (lambda tensors, at: tensors.update(t2d=torch.ones(8)), r"t2d is \[8\] up to 1; wanted 0 or 1 for 259 tokens"),
        (
            lambda tensors, at: [tensors.pop("t2d"), tensors.update(d2t=torch.arange(3, 67))],
            "d2t may hold the target's ids or offsets to them, and there is no t2d that tells which",
        ),
        (
            lambda tensors, at: tensors.update({"embed_tokens.weight": torch.zeros(259, 128)}),
            "embed_tokens.weight is not the target's",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    write: Write,
    layout: str,
    tiny_target: Path,
    spoil: Callable[[dict[str, Tensor], Callable[[str], str]], object],
    fault: str,
) -> None:
    directory = write(lambda config, tensors: spoil(tensors, lambda name: at(layout, name)))
    with pytest.raises(ValueError, match=fault):
        eagle3.adopt(directory, tiny_target)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"vocab_size": 300}, "the head has vocab_size 300, the target has 259"),
        ({"hidden_size": 64}, "the head has hidden_size 64, the target has 128"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act 'gelu'; only 'silu' is supported"),
        ({"num_hidden_layers": 2}, "config.json has num_hidden_layers 2; only 1 is supported"),
        ({"model_type": "qwen3"}, "the head's layer is of model_type 'qwen3'; only 'llama' is supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the head is quantized"),
        ({"intermediate_size": None}, "config.json has intermediate_size None; wanted a number"),
    ],
)
def test_a_layer_of_another_shape_is_refused(
    write: Write, layout: str, tiny_target: Path, changed: dict[str, Any], fault: str
) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        (config if layout == "native" else config["transformer_layer_config"]).update(changed)

    with pytest.raises(ValueError, match=fault):
        eagle3.adopt(write(change), tiny_target)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            r"architectures \['LlamaForCausalLM'\] and draft_vocab_size None; wanted",
        ),
        ({"architectures": ["DFlashDraftModel"], "draft_vocab_size": 8}, "wanted an EAGLE-3 head"),
        ({"speculators_model_type": "peagle", "transformer_layer_config": {}}, "speculators_model_type is 'peagle'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config NoneType; wanted 'eagle3' with a table"),
    ],
)
def test_a_config_of_neither_layout_is_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_published(config, {}, 32)


def test_settings_of_a_head_that_are_not_supported_are_refused() -> None:
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": NATIVE_CONFIG, key: True}
        with pytest.raises(ValueError, match=f"config.json has {key} True; only False is supported"):
            read_published(config, {}, 32)


def test_tensors_under_both_layouts_names_are_refused() -> None:
    twice = {name: torch.zeros(1) for name in ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")}
    with pytest.raises(ValueError, match=r"midlayer.hidden_norm.weight is there twice"):
        read_published(NATIVE_CONFIG, twice, 32)


def test_another_tokenizer_beside_the_head_is_refused(write: Write, tiny_target: Path) -> None:
    directory = write()
    tokenizer = json.loads((tiny_target / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    eagle3.adopt(directory, tiny_target)
    tokens = tokenizer["model"]["vocab"]
    tokens["a"], tokens["b"] = tokens["b"], tokens["a"]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ValueError, match="the head's tokenizer is not the target's: 2 tokens differ, such as 'a'"):
        eagle3.adopt(directory, tiny_target)


def test_pickled_weights_and_a_place_without_a_head_are_refused(
    write: Write, tiny_target: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="nowhere is not a directory"):
        eagle3.adopt(tmp_path / "nowhere", tiny_target)
    directory = write()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is a pickle, which could run code; wanted safetensors"):
        eagle3.adopt(directory, tiny_target)


def test_a_head_that_can_say_every_token_needs_no_map(tiny_target: Path, tmp_path: Path) -> None:
    whole = eagle3.create(eagle3.Params(vocab_size=259), tiny_target, np.ones(259))
    eagle3.save(whole, tmp_path)
    assert "d2t" not in load_file(tmp_path / "model.safetensors")
    assert eagle3.adopt(tmp_path, tiny_target).vocabulary.tolist() == list(range(259))
    assert eagle3.load(tmp_path, tiny_target).vocabulary.tolist() == list(range(259))
