"""Lets vLLM's renderer encode chats as everything else here does, so that no text of a client becomes a special token.

`HfRenderer` calls `safe_apply_chat_template` for every chat: of /v1/chat/completions, /v1/responses and /tokenize. It
is to return a text, which is then encoded with all markers in it, whoever wrote them; here it returns token ids
(`models.chats`). It is called in a thread; vLLM's own limit of a text's length is kept, as ids come too late for it.
And a chat that brings token ids in place of its messages, which vLLM takes without a look at those, is refused.

Replaces: `vllm.renderers.hf.safe_apply_chat_template`, `vllm.renderers.online_renderer._reused_prompt_token_ids`.
Tried with: vLLM 0.32.
No hook: none lies between a chat's messages and its ids; a renderer of one's own is chosen by the tokenizer's mode, and
    would be a copy of `HfRenderer`.
Without it: a marker in a message, a tool or an argument closes a turn, and so does one among ids.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.renderers import hf, online_renderer
from vllm.renderers.base import BaseRenderer

from models.chats import ChatEncoder
from models.engines.vllm.patches import replace

IDS = "prompt_token_ids"


def install() -> None:
    """Replace vLLM's functions for renderers that are made from now on."""
    hf.safe_apply_chat_template = chat_ids  # type: ignore[assignment]  # theirs may return a text, too
    replace(online_renderer, "_reused_prompt_token_ids", _refuse_ids)


def _refuse_ids(own: Callable[..., Any], request: Any, *args: Any) -> Any:
    if (getattr(request, "kv_transfer_params", None) or {}).get(IDS) is not None:
        raise VLLMValidationError(
            "a chat's token ids come from its messages alone; leave kv_transfer_params.prompt_token_ids out",
            parameter=f"kv_transfer_params.{IDS}",
        )
    return own(request, *args)


def require_guarded(renderer: BaseRenderer[Any]) -> None:
    """Return if all chats of a renderer are encoded here; ValueError if some are not."""
    model_type = renderer.model_config.hf_config.model_type
    if not isinstance(renderer, hf.HfRenderer) or model_type == "gpt_oss":
        raise ValueError(
            f"chats of a {model_type} model are rendered by vLLM in a way of their own, which nothing guards"
        )
    if renderer.model_config.enable_prompt_embeds:
        raise ValueError("enable_prompt_embeds is true; embeddings in a chat are not taken")
    encoder = ChatEncoder.of(renderer.get_tokenizer())
    with suppress(ValueError):  # a template may want other messages
        encoder.encode([{"role": "user", "content": "hi"}])  # compiling the template would hold up the first chat


def chat_ids(
    model_config: ModelConfig,
    tokenizer: Any,
    conversation: Sequence[Mapping[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    chat_template: str | None = None,
    tokenize: bool = True,
    **arguments: Any,
) -> list[int]:
    """Return the token ids of a chat; the arguments are those of vLLM's function.

    Raises:
        VLLMValidationError: the template refuses it, or it is too long.
    """
    template = hf.resolve_chat_template(tokenizer, chat_template, tools, model_config=model_config)
    if template is None:
        raise VLLMValidationError("the model has no chat template")
    most = model_config.max_model_len * tokenizer.max_chars_per_token
    try:
        return ChatEncoder.of(tokenizer).encode_conversation(conversation, tools, template, arguments, most)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="messages") from error
