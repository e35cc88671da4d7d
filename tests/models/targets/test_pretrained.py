import importlib.metadata
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from models.targets import describe
from models.targets.pretrained import Params, build, config, tokenizer
from models.targets.smollm2 import WHEEL, find_gguf
from tests.models.families import MULTIMODAL, write_family


@pytest.fixture
def mine(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy of the target, to be changed."""
    return Path(shutil.copytree(tiny_target, tmp_path / "mine"))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "made").mkdir()
    return tmp_path / "made"


def test_a_local_directory_becomes_a_target_whose_weights_stay_where_they_lie(
    tiny_target: Path, tmp_path: Path
) -> None:
    build(Params(path=str(tiny_target)), tmp_path)
    assert describe(tmp_path) == describe(tiny_target)
    assert (tmp_path / "model.safetensors").readlink() == tiny_target / "model.safetensors"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(one, whole[name]) for name, one in load_file(tiny_target / "model.safetensors").items())


def test_weights_in_several_files_stay_with_their_index(tiny_target: Path, mine: Path, made: Path) -> None:
    (mine / "model.safetensors").rename(mine / "consolidated.safetensors")  # the same, which no index names
    AutoModelForCausalLM.from_pretrained(tiny_target).save_pretrained(mine, max_shard_size="200KB")
    build(Params(path=str(mine)), made)
    links = {path.name: path.readlink() for path in made.iterdir() if path.is_symlink()}
    assert links == {path.name: path for path in mine.glob("model-*.safetensors")}
    assert len(links) > 1
    _, report = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not report["missing_keys"]


def test_weights_of_another_format_than_is_wanted_are_written_anew(tiny_target: Path, tmp_path: Path) -> None:
    build(Params(path=str(tiny_target), dtype="float32"), tmp_path)
    assert not (tmp_path / "model.safetensors").is_symlink()
    assert {one.dtype for one in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}


def test_what_was_fetched_from_a_hub_stays_in_its_cache(
    tiny_target: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository, commit = tmp_path / "models--an--own", "ab" * 20
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (snapshot := repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in tiny_target.iterdir():
        shutil.copy(file, repository / "blobs" / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"blob-{file.name}"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    build(Params(path="an/own"), made)
    assert (made / "model.safetensors").readlink() == repository / "blobs" / "blob-model.safetensors"
    assert describe(made).sha256 == describe(tiny_target).sha256


Spoil = Callable[[Path], object]


def without(*names: str) -> Spoil:
    return lambda copy: [(copy / name).unlink() for name in names]


def without_tensor(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})


def with_config(**changed: object) -> Spoil:
    def change(copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **changed}))

    return change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (without("config.json"), "is not a Hugging Face model directory: it has no config.json"),
        (without("model.safetensors"), "is not a Hugging Face model directory: it has no safetensors weights"),
        (without("tokenizer.json"), r"is not .*: it has no tokenizer \(tokenizer.json, tokenizer.model"),
        (lambda copy: (copy / "config.json").write_text("{"), "can't be loaded: .*config.json"),
        (with_config(model_type="nobody"), "can't be loaded: .*nobody"),
        (with_config(model_type="t5"), "is an encoder-decoder \\(t5\\); wanted a causal language model"),
        (with_config(model_type="qwen2_vl_text"), "is of model_type 'qwen2_vl_text', which is not one of a causal"),
        (lambda copy: (copy / "model.safetensors").write_bytes(b"junk"), "can't be loaded: "),
        (without_tensor, r"has no tensor model.layers.1.mlp.up_proj.weight \(1 are missing\)"),
        (shutil.rmtree, "is not a directory"),
    ],
)
def test_a_directory_without_a_model_is_refused_in_one_line(mine: Path, made: Path, spoil: Spoil, fault: str) -> None:
    spoil(mine)
    with pytest.raises(ValueError, match=f"target '{mine}' {fault}") as error:
        build(Params(path=str(mine)), made)
    assert "\n" not in str(error.value)
    assert list(made.iterdir()) == []


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="is neither .* on a hub in reach: none is asked; set REDRAFT_HUB=true$"):
        build(Params(path="nobody/nothing"), tmp_path)


@pytest.mark.parametrize("method", ["awq", "bitsandbytes"])
def test_a_form_that_can_not_be_restored_is_refused(mine: Path, method: str) -> None:
    with_config(quantization_config={"quant_method": method, "bits": 4})(mine)
    with pytest.raises(ValueError, match=f"is quantized by {method}; wanted one in 16 bits .*compressed-tensors, fp8"):
        config(Params(path=str(mine)))


def test_float8_weights_in_blocks_become_what_they_stand_for(tiny_target: Path, mine: Path, made: Path) -> None:
    tensors, name = load_file(mine / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    for key in [one for one in tensors if one.endswith("_proj.weight")]:
        scale = tensors[key].float().abs().max() / 448
        blocks = [-(-size // 128) for size in tensors[key].shape]
        tensors[key + "_scale_inv"] = torch.full(blocks, float(scale))
        tensors[key] = (tensors[key].float() / scale).to(torch.float8_e4m3fn)
    save_file(tensors, mine / "model.safetensors", metadata={"format": "pt"})
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    with_config(quantization_config=scheme)(mine)
    build(Params(path=str(mine)), made)
    wanted, got = (load_file(one / "model.safetensors")[name].float() for one in (tiny_target, made))
    torch.testing.assert_close(got, wanted, rtol=0.08, atol=1e-3)
    assert "quantization_config" not in json.loads((made / "config.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_of_a_model_that_reads_images_the_language_model_is_taken(model_type: str, made: Path, tmp_path: Path) -> None:
    source = write_family(model_type, tmp_path / "source")
    build(Params(path=str(source)), made)
    ids = torch.tensor([[5, 9, 14]])
    whole, text = AutoModelForMultimodalLM.from_pretrained(source), AutoModelForCausalLM.from_pretrained(made)
    assert text.config.model_type == MULTIMODAL[model_type]
    with torch.inference_mode():
        torch.testing.assert_close(text(ids).logits, whole(ids).logits)
    assert (describe(made).hidden_size, describe(made).num_layers) == (128, 2)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma"])
def test_sizes_are_read_whatever_a_family_calls_them(model_type: str, tmp_path: Path) -> None:
    card = describe(write_family(model_type, tmp_path))
    assert (card.hidden_size, card.num_layers, card.vocab_size) == (128, 2, 259)


def test_a_chat_template_is_the_models_own_the_recipes_or_plain(tiny_target: Path, mine: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (mine / "chat_template.jinja").unlink()
    (tmp_path / "own.jinja").write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    own = str(tmp_path / "own.jinja")
    for path, template, wanted in (
        (tiny_target, "", "<|im_start|>user\na<|im_end|>"),
        (mine, "", "a\nb\nc"),
        (mine, own, "[a][b][c]"),
        (tiny_target, own, "[a][b][c]"),
    ):
        said = tokenizer(Params(path=str(path), chat_template=template)).apply_chat_template(chat, tokenize=False)
        assert said.startswith(wanted)
    with pytest.raises(ValueError, match=r"chat_template 'none.jinja' is no file; wanted one of Jinja"):
        tokenizer(Params(path=str(mine), chat_template="none.jinja"))


def test_a_path_may_begin_in_the_users_home(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(mine.parent))
    assert config(Params(path="~/mine")).hidden_size == 128


def test_a_folder_of_gguf_files_asks_for_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ValueError, match=f"holds GGUF files; name one of them as path, such as '{tmp_path}/a.gguf'"):
        config(Params(path=str(tmp_path)))
    with pytest.raises(ValueError, match="b.gguf' is not a file"):
        config(Params(path=str(tmp_path / "b.gguf")))


@pytest.mark.slow
def test_a_gguf_file_is_a_target(tmp_path: Path) -> None:
    if not list(importlib.metadata.Distribution.discover(name=WHEEL)):
        pytest.skip(f"{WHEEL} is not installed")
    found = config(Params(path=str(find_gguf())))
    assert (found.model_type, found.num_hidden_layers, found.vocab_size) == ("llama", 30, 49152)
