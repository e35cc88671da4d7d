"""A Llama of a given shape with random weights, to be pretrained from nothing, with the tokenizer of another target.

The vocabulary is the other target's, so in a small model most weights are the embedding, which is the output matrix
too. Weights are drawn as transformers draws them, normal with a deviation of 0.02.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from transformers import LlamaConfig, PreTrainedTokenizerBase

from models import catalog
from models.core.checkpoints.loading import write_random
from models.params import BaseParams

PAPER = "none"
HEAD_DIM = 64  # the least that vLLM's CPU attention takes


class Params(BaseParams):
    """Shape of the target; the hidden size is num_heads × 64."""

    name: Literal["scratch"] = "scratch"
    tokenizer: Annotated[BaseParams, catalog.Method("targets")] = Field(
        description="table of the target whose tokenizer and chat template it has."
    )
    num_layers: int = Field(6, ge=1, description="decoder blocks.")
    num_heads: int = Field(4, ge=1, description="query heads.")
    num_kv_heads: int = Field(2, ge=1, description="key and value heads, a divisor of num_heads.")
    intermediate_size: int = Field(768, ge=1, description="channels of an MLP.")
    max_length: int = Field(2048, ge=16, description="tokens of the longest context.")
    seed: int = Field(0, description="of the weights.")

    @model_validator(mode="after")
    def _heads_share(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        return self


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`; ValueError if the tokenizer can't be had, as its target says."""
    write_random(config(params), tokenizer(params), params.seed, directory)


def config(params: Params) -> LlamaConfig:
    """Return the target's configuration; ValueError as `build`."""
    vocabulary = tokenizer(params)
    made = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=HEAD_DIM * params.num_heads,
        intermediate_size=params.intermediate_size,
        num_hidden_layers=params.num_layers,
        num_attention_heads=params.num_heads,
        num_key_value_heads=params.num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=params.max_length,
        tie_word_embeddings=True,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        pad_token_id=vocabulary.pad_token_id,
    )
    made._name_or_path = f"scratch-llama-{params.seed}"
    return made


def tokenizer(params: Params) -> PreTrainedTokenizerBase:
    """Return the other target's tokenizer."""
    other = params.tokenizer
    found: PreTrainedTokenizerBase = catalog.load("targets", other.name).tokenizer(other)
    return found
