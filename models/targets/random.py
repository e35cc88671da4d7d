"""A small Llama with random weights and a byte-level tokenizer, made from nothing: the tests' target.

The weights are drawn wider than usual (`init_std`), because at 0.02 every next token is nearly equally likely and a
greedy output hangs on rounding.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from models.core.checkpoints.loading import write_random
from models.params import BaseParams

PAPER = "none"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Params(BaseParams):
    """Shape of the target; heads are 64 wide, the least that vLLM's CPU attention takes."""

    name: Literal["random"] = "random"
    num_layers: int = Field(2, description="decoder blocks.")
    num_heads: int = Field(2, description="query heads; the hidden size is num_heads × 64.")
    num_kv_heads: int = Field(1, description="key and value heads.")
    intermediate_size: int = Field(256, description="channels of an MLP.")
    init_std: float = Field(0.08, description="standard deviation of the weights.")
    seed: int = Field(0, description="of the weights.")


def build(params: Params, directory: Path) -> None:
    """Write the target into `directory`."""
    write_random(config(params), tokenizer(params), params.seed, directory)


def config(params: Params) -> LlamaConfig:
    """Return the target's configuration."""
    vocabulary = tokenizer(params)
    made = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64 * params.num_heads,
        intermediate_size=params.intermediate_size,
        num_hidden_layers=params.num_layers,
        num_attention_heads=params.num_heads,
        num_key_value_heads=params.num_kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=params.init_std,
        tie_word_embeddings=True,
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
    )
    made._model_name_or_path = f"random-llama-{params.seed}"
    return made


def tokenizer(params: Params) -> PreTrainedTokenizerFast:
    """Return the target's tokenizer, the same for every shape."""
    return byte_tokenizer()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 bytes and the special tokens, without merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )
