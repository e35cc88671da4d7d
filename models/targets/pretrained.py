"""Any causal language model: a Hugging Face directory, a GGUF file, or a hub id where a hub can be reached.

Weights that can be served as they are stay where they lie, in the directory or the hub's cache, and the target has
links to them. Of a model that reads more than text its language model is taken. GGUF files and the forms in
`DEQUANTIZED` become the floats that they stand for; what compressed-tensors keeps stays as it is where
`models.core.checkpoints.compressed` can read it. `config` refuses all that can't be taken, before any weight is read.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Self

import torch
from huggingface_hub import constants, snapshot_download
from pydantic import Field, model_validator
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from models.core.checkpoints import compressed
from models.core.checkpoints.loading import load_reported
from models.params import BaseParams, LocalPath, require_unsaid
from models.targets import PLAIN_TEMPLATE, TOKENIZER_FILES

PAPER = "none: whatever the directory holds"
GGUF = ".gguf"
DEQUANTIZED = ("fp8",)
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Params(BaseParams):
    """Which model."""

    name: Literal["pretrained"] = "pretrained"
    path: LocalPath = Field(
        description='a directory, a GGUF file, or a hub id such as "Qwen/Qwen3-8B", which needs REDRAFT_HUB=true.'
    )
    revision: str = Field("main", description="a branch, tag or commit of the hub's repository.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description='"auto" keeps the format of the files, and makes bfloat16 of a GGUF file.'
    )
    chat_template: LocalPath = Field(
        "",
        description="a Jinja file; by default the model's own template, and where it has none, each message in a line.",
    )

    @model_validator(mode="after")
    def _has_revisions(self) -> Self:
        if Path(self.path).exists():
            require_unsaid(self, ["revision"], self.name, f"{self.path} is a local directory")
        return self


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`; remote code is never run. ValueError as `config`, or if a tensor is missing;
    names it."""
    found, source = _read_config(params), _source(params)
    if weights := _served_as_they_are(params, found):
        for file in weights:
            (directory / file.name).symlink_to(file.resolve())
        for name in (_INDEX, "config.json", "generation_config.json"):
            if (file := weights[0].parent / name).is_file():
                shutil.copyfile(file, directory / name)
        tokenizer(params).save_pretrained(directory)
        return
    dtype = "auto" if params.dtype == "auto" else getattr(torch, params.dtype)
    if "gguf_file" in source:
        dtype = torch.bfloat16 if dtype == "auto" else dtype
        source |= {"quantization_config": GgufConfig(dequantize=True)}
    else:
        source |= {"config": found, "use_safetensors": True}
    of_text = found.get_text_config() is found
    kind = AutoModelForCausalLM if of_text else AutoModelForMultimodalLM
    with _told_apart(params):
        model, missing = load_reported(kind=kind, dtype=dtype, **source)
    if missing:
        raise ValueError(f"target {params.path!r} has no tensor {missing[0]} ({len(missing)} are missing)")
    if not of_text or getattr(found, "quantization_config", {}).get("dequantize"):
        model = _language_model(model)
    model.save_pretrained(directory)
    tokenizer(params).save_pretrained(directory)


def config(params: Params) -> PreTrainedConfig:
    """Return the language model's configuration, without its weights. ValueError if there is no such model, no hub to
    ask, or it is of a kind or in a form that can't be taken; names what is missing, or what to do."""
    return _read_config(params).get_text_config()


def tokenizer(params: Params) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; ValueError as `config`, or if the chat template can't be read."""
    with _told_apart(params):
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_source(params))
    if params.chat_template:
        file = Path(params.chat_template)
        if not file.is_file():
            raise ValueError(f"chat_template {params.chat_template!r} is no file; wanted one of Jinja")
        found.chat_template = file.read_text(encoding="utf-8")
    elif not found.chat_template:
        found.chat_template = PLAIN_TEMPLATE
    return found


def _read_config(params: Params) -> PreTrainedConfig:
    local = Path(params.path)
    if local.suffix == GGUF and not local.is_file():
        raise ValueError(f"target '{local}' is not a file")
    if local.suffix != GGUF and (local.exists() or params.path.startswith(("/", "."))):
        _require_model(local)
    with _told_apart(params):
        found: PreTrainedConfig = AutoConfig.from_pretrained(**_source(params))
    text, named = found.get_text_config(), f"target {params.path!r}"
    if found.is_encoder_decoder:
        raise ValueError(f"{named} is an encoder-decoder ({found.model_type}); wanted a causal language model")
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{named} is of model_type {text.model_type!r}, which is not one of a causal language model")
    scheme = getattr(found, "quantization_config", None)
    if scheme is None:
        return found
    scheme = scheme if isinstance(scheme, dict) else scheme.to_dict()
    method = scheme.get("quant_method")
    if method == compressed.METHOD and text is found:
        compressed.known_bits(scheme)
    elif method in DEQUANTIZED:
        found.quantization_config = {**scheme, "dequantize": True}
    else:
        raise ValueError(
            f"{named} is quantized by {method}; wanted one in 16 bits (then quantize it by [quantize]), a GGUF file, "
            f"or one by {', '.join((compressed.METHOD, *DEQUANTIZED))}"
        )
    return found


def _source(params: Params) -> dict[str, Any]:
    """Return where transformers finds the model."""
    local = Path(params.path)
    if local.suffix == GGUF:
        return {"pretrained_model_name_or_path": str(local.parent), "gguf_file": local.name}
    return {"pretrained_model_name_or_path": params.path, "revision": params.revision, "trust_remote_code": False}


def _served_as_they_are(params: Params, found: PreTrainedConfig) -> list[Path]:
    """Return the files of weights that are what `build` would write: these tensors, in this format; [] if it must."""
    local, dtypes = Path(params.path), {found.dtype if params.dtype == "auto" else getattr(torch, params.dtype)}
    is_changed = found.get_text_config() is not found or getattr(found, "quantization_config", None)
    if local.suffix == GGUF or is_changed or getattr(found, "auto_map", None):  # which names code of the model's own
        return []
    with _told_apart(params):
        folder = local
        if not local.is_dir():
            named = ["*.json", "model*.safetensors"]  # not what some repositories hold beside these, in other forms
            folder = Path(snapshot_download(params.path, revision=params.revision, allow_patterns=named))
        index = folder / _INDEX
        names = {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {_WEIGHTS}
        files = [folder / name for name in sorted(names)]
        if not all(file.is_file() for file in files):
            return []
        stored, formats = dict[str, tuple[int, ...]](), set[str]()
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    part = opened.get_slice(name)
                    stored[name] = tuple(part.get_shape())
                    formats.add(part.get_dtype())
    with torch.device("meta"):
        wanted = {name: tuple(one.shape) for name, one in AutoModelForCausalLM.from_config(found).state_dict().items()}
    tied = {"lm_head.weight"} if found.tie_word_embeddings else set()
    same = stored.items() <= wanted.items() and wanted.keys() - stored.keys() <= tied
    return files if same and {_FORMATS.get(one) for one in formats} == dtypes else []


def _language_model(whole: PreTrainedModel) -> PreTrainedModel:
    """Return a causal language model of the decoder and the output matrix of another, and nothing else of it: it may
    read more than text, and one that was de-quantized would be quantized again where it is saved."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(whole.config.get_text_config())
    setattr(model, model.base_model_prefix, whole.get_decoder())
    model.set_output_embeddings(whole.get_output_embeddings())
    model.generation_config = whole.generation_config
    return model


@contextmanager
def _told_apart(params: Params) -> Iterator[None]:
    """Say whether a directory is at fault or a hub that can't be reached."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        wrong, why = "can't be loaded", str(error).strip().splitlines()[0]
        if not Path(params.path).exists():
            wrong = "is neither a local directory nor on a hub in reach"
            why = "none is asked; set REDRAFT_HUB=true" if constants.HF_HUB_OFFLINE else why
        raise ValueError(f"target {params.path!r} {wrong}: {why}") from error


def _require_model(directory: Path) -> None:
    if not directory.is_dir():
        raise ValueError(f"target '{directory}' is not a directory")
    if not (directory / "config.json").is_file() and (files := sorted(directory.glob(f"*{GGUF}"))):
        raise ValueError(f"target '{directory}' holds GGUF files; name one of them as path, such as '{files[0]}'")
    for what, patterns in (
        ("config.json", ("config.json",)),
        ("safetensors weights", ("*.safetensors",)),
        (f"tokenizer ({', '.join(TOKENIZER_FILES)})", TOKENIZER_FILES),
    ):
        if not any(file for pattern in patterns for file in directory.glob(pattern)):
            raise ValueError(f"target '{directory}' is not a Hugging Face model directory: it has no {what}")
