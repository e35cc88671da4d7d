import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.core.checkpoints.loading import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.drafts import eagle3
from models.drafts.eagle3.layouts import NORMS, TAPS, read_published
from models.targets import describe
from tests.models.published import Change, in_speculators_layout, like_eagle31, like_qwen3, published

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
    rewritten |= {"norm_before_fc": True, "norm_output": True}
    ours = read_published(rewritten, {}, 2)
    theirs = SpeculatorsConfig.extract_transformers_pre_trained_config(rewritten)
    assert [list(taps) for taps in ours.readings] == [theirs[TAPS]]
    assert ours.norms == {name: True for name in NORMS if theirs[name]}
    assert ours.norms.keys() == {"norm_before_residual", "norm_before_fc", "norm_output"}
    assert ours.draft_vocab_size == theirs["draft_vocab_size"]
    assert ours.layer.intermediate_size == theirs["intermediate_size"]


UNKNOWN, EMBEDDING = "layers.1.mlp.up_proj.weight", "embed_tokens.weight"
SPOILT: dict[str, Callable[[dict[str, Tensor], Callable[[str], str]], object]] = {
    "midlayer.mlp.up_proj.weight is missing": lambda all_, at: all_.pop(at("midlayer.mlp.up_proj.weight")),
    "d2t is missing": lambda all_, at: all_.pop("d2t"),
    "lm_head.weight is missing": lambda all_, at: all_.pop("lm_head.weight"),  # of a part no engine could borrow it
    f"{UNKNOWN} is not one of this draft's": lambda all_, at: all_.update({UNKNOWN: torch.zeros(2)}),
    "d2t names 64, 0 of them if it holds offsets": lambda all_, at: all_["d2t"].fill_(300),
    "contradict each other: t2d marks 74 tokens": lambda all_, at: all_["t2d"][70:80].fill_(True),
    r"t2d is \[8\] up to 1; wanted 0 or 1 for 259 tokens": lambda all_, at: all_.update(t2d=torch.ones(8)),
    "and there is no t2d that tells which": lambda all_, at: [all_.pop("t2d"), all_.update(d2t=torch.arange(3, 67))],
    f"{EMBEDDING} is not the target's": lambda all_, at: all_.update({EMBEDDING: torch.zeros(259, 128)}),
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_tensor_that_does_not_fit_is_refused_by_name(write, layout, tiny_target, fault) -> None:
    directory = write(lambda config, tensors: SPOILT[fault](tensors, lambda name: at(layout, name)))
    with pytest.raises(ValueError, match=fault):
        eagle3.adopt(directory, tiny_target)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"vocab_size": 300}, "the head has vocab_size 300, the target has 259"),
        ({"hidden_size": 64}, "the head has hidden_size 64, the target has 128"),
        ({"hidden_act": "gelu"}, "config.json has hidden_act 'gelu'; only 'silu' is supported"),
        ({"num_hidden_layers": 2}, "config.json has num_hidden_layers 2; only 1 is supported"),
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the head is quantized"),
        ({"intermediate_size": None}, "config.json has intermediate_size None; wanted a number"),
    ],
)
def test_a_layer_of_another_shape_is_refused(write, layout, tiny_target, changed, fault) -> None:
    def change(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        (config if layout == "native" else config["transformer_layer_config"]).update(changed)

    with pytest.raises(ValueError, match=fault):
        eagle3.adopt(write(change), tiny_target)


def of_speculators(**layer: object) -> dict[str, Any]:
    return {"speculators_model_type": "eagle3", "transformer_layer_config": {**NATIVE_CONFIG, **layer}}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"\['LlamaForCausalLM'\] and draft_vocab_size None; wanted"),
        ({"architectures": ["DFlashDraftModel"], "draft_vocab_size": 8}, "wanted an EAGLE-3 head"),
        ({"speculators_model_type": "peagle", "transformer_layer_config": {}}, "speculators_model_type is 'peagle'"),
        ({"speculators_model_type": "eagle3"}, "transformer_layer_config NoneType; wanted 'eagle3' with a table"),
        (of_speculators(mlp_bias=True), "config.json has mlp_bias True; only False is supported"),
        (of_speculators(logit_scale=0.5), "config.json has logit_scale 0.5; only 1.0 is supported"),
        (of_speculators(is_causal=False), "config.json has is_causal False; only True is supported"),
        ({**NATIVE_CONFIG, "layer_types": ["sliding_attention"]}, "sliding-window attention; only full attention is"),
        ({**NATIVE_CONFIG, "model_type": "qwen3"}, "'qwen3'; the layer of architecture LlamaForCausalLMEagle3 is of"),
    ],
)
def test_a_config_of_neither_layout_or_of_another_layer_is_refused(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_published(config, {}, 32)


def test_a_head_that_names_no_vocabulary_of_its_own_says_all_of_the_targets_tokens() -> None:
    config = {key: value for key, value in NATIVE_CONFIG.items() if key != "draft_vocab_size"}
    assert read_published(config, {}, 32).draft_vocab_size == 9


@pytest.mark.parametrize("like", [like_eagle31, like_qwen3])
def test_heads_of_other_norms_and_layers_come_back_from_their_import_and_their_export(
    write: Write, layout: str, like: Change, tiny_target: Path, tmp_path: Path
) -> None:
    source, folders = write(like), [tmp_path / name for name in ("adopted", "exported", "again")]
    for folder in folders:
        folder.mkdir()
    adopted, exported, again = folders
    eagle3.save(eagle3.adopt(source, tiny_target), adopted)
    eagle3.check(adopted, None, describe(tiny_target))
    kept = load_file(adopted / "model.safetensors")
    names = {name.replace("layers.0.", "midlayer.") for name in load_file(source / "model.safetensors")}
    assert kept.keys() == names - {"t2d", "embed_tokens.weight"}
    verifier = {"name_or_path": "t", "architectures": ["LlamaForCausalLM"]}
    eagle3.publish(adopted, exported, verifier, 3)
    eagle3.save(eagle3.adopt(exported, tiny_target), again)
    for name in ("config.json", "model.safetensors"):
        assert (adopted / name).read_bytes() == (again / name).read_bytes(), name


def whole(config: dict[str, Any], tensors: dict[str, Tensor], size: int = 259) -> None:
    """Let a head say all of `size` tokens, with rows of its own in the output matrix."""
    config.get("transformer_layer_config", config)["vocab_size"] = config["draft_vocab_size"] = size
    for name in ("d2t", "t2d"):
        del tensors[name]
    tensors["lm_head.weight"] = torch.randn(size, 128, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_a_head_of_all_tokens_borrows_what_it_lacks_of_the_targets_output(write: Write, tiny_target: Path) -> None:
    def without_output(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        whole(config, tensors)
        del tensors["lm_head.weight"], tensors["norm.weight"]

    adopted = eagle3.adopt(write(without_output), tiny_target)
    assert torch.equal(adopted.lm_head.weight, output_embedding(tiny_target))
    assert torch.equal(adopted.norm.weight, read_tensor(tiny_target, "model.norm.weight").float())


def padded(target: Path, directory: Path, size: int) -> Path:
    """Copy a target whose matrices go on behind its tokenizer's tokens."""
    copytree(target, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    tensors = load_file(directory / "model.safetensors")
    rows = torch.randn(size - config["vocab_size"], 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors["model.embed_tokens.weight"] = torch.cat([tensors["model.embed_tokens.weight"], rows])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("of_head", "of_target"), [(272, 259), (259, 272), (264, 272)])
def test_a_vocabulary_that_is_padded_otherwise_is_cut_or_filled_with_the_targets_rows(
    write: Write, tiny_target: Path, tmp_path: Path, of_head: int, of_target: int
) -> None:
    target = padded(tiny_target, tmp_path / "target", of_target)
    embedding = output_embedding(target).bfloat16()

    def pad(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        whole(config, tensors, of_head)
        if "embed_tokens.weight" in tensors:
            more = torch.zeros(max(0, of_head - of_target), 128, dtype=torch.bfloat16)
            tensors["embed_tokens.weight"] = torch.cat([embedding[:of_head], more])

    source = write(pad)
    with pytest.raises(
        ValueError, match=f"head has vocab_size {of_head}, the target has {of_target}; the target's tok"
    ):
        eagle3.adopt(source, target)
    copy(tiny_target / "tokenizer.json", source)
    adopted = eagle3.adopt(source, target)
    own = load_file(source / "model.safetensors")["lm_head.weight"]
    assert adopted.config["draft_vocab_size"] == adopted.config["vocab_size"] == of_target
    assert torch.equal(adopted.lm_head.weight, torch.cat([own[:of_target], embedding[of_head:]]).float())


@pytest.mark.parametrize(("of_head", "of_target"), [(272, 259), (259, 272)])
def test_a_part_of_a_vocabulary_that_is_padded_otherwise_stays_as_it_is(
    write: Write, tiny_draft: Path, tiny_target: Path, tmp_path: Path, of_head: int, of_target: int
) -> None:
    target = padded(tiny_target, tmp_path / "target", of_target)

    def pad(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        config.get("transformer_layer_config", config)["vocab_size"] = of_head
        tensors.pop("embed_tokens.weight", None)
        tensors["t2d"] = torch.nn.functional.pad(tensors["t2d"], (0, of_head - 259))

    source = write(pad)
    copy(tiny_target / "tokenizer.json", source)
    adopted = eagle3.adopt(source, target)
    assert (adopted.config["draft_vocab_size"], adopted.config["vocab_size"]) == (64, of_target)
    assert adopted.vocabulary.tolist() == eagle3.load(tiny_draft, tiny_target).vocabulary.tolist()


def test_a_vocabulary_that_is_too_small_for_the_tokenizer_is_refused(write: Write, tiny_target: Path) -> None:
    source = write(lambda config, tensors: whole(config, tensors, 200))
    copy(tiny_target / "tokenizer.json", source)
    with pytest.raises(ValueError, match="vocab_size 200, the target has 259, and their tokenizer has 259 tokens"):
        eagle3.adopt(source, tiny_target)


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


def test_pickled_weights_and_a_place_without_a_head_are_refused(write, tiny_target, tmp_path) -> None:
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
