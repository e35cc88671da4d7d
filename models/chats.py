"""One chat, one list of token ids: what is served, imported and generated is encoded here.

A chat template writes its markers as text, so a marker that a client, a tool or a file wrote would become the model's
own. Here no string of a chat can: two private characters stand inside each marker that a string holds, or could become
a part of, while the template runs (`models.markers`). What the template wrote itself then gets a name that nobody can
guess, and a copy of the tokenizer whose added tokens bear these names encodes the whole text at once.

Plain text is every added token, special or not, in what users, systems and tools wrote, in names, arguments, tools and
the template's arguments; in what the assistant wrote, what is special or ends an answer. How earlier turns' thoughts
are shown stays the template's.

Messages are read as vLLM 0.32 reads them (`vllm.renderers.chat_utils`), so that a chat from a file has the ids that it
has when it is served.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateSyntaxError, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

from models.markers import Markers
from models.targets import stop_ids

Format = Literal["string", "openai"]
TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
# What OpenAI's parts of a message are made of; a template may read other fields, such as cache_control.
MEDIA_FIELDS = {"audio_embeds", "audio_url", "file", "image_embeds", "image_pil", "image_url", "input_audio"}
TEXT_FIELDS = {"closed", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid"}
PART_FIELDS = {*MEDIA_FIELDS, *TEXT_FIELDS, "data", "video_embeds", "video_url"}
OWN = ("content", "reasoning", "reasoning_content")
BILLING = "x-anthropic-billing-header"  # changes with each request of one client, so vLLM takes it out


class ChatEncoder:
    """Encodes chats and texts for one tokenizer, made by `of`; threads may share it."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a Hugging Face tokenizer of the `tokenizers` library; ValueError as `Markers`."""
        self._tokenizer = tokenizer
        directory = Path(tokenizer.name_or_path)
        ends = stop_ids(directory) if (directory / "config.json").is_file() else frozenset()
        self._markers = Markers(tokenizer, ends | set(tokenizer.all_special_ids))

    @classmethod
    @lru_cache(maxsize=8)
    def of(cls, tokenizer: Any) -> "ChatEncoder":
        """Return the tokenizer's encoder, which is made once."""
        return cls(tokenizer)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encode a chat as the service does; messages and tools are as OpenAI's API takes them.

        `template_arguments` are what else the template is given, a request's `chat_template_kwargs`. ValueError if
        there are no messages, one is not of text, or the template refuses them.
        """
        wanted = [_read_tool(tool) for tool in tools] if tools is not None else None
        template = self._tokenizer.get_chat_template(chat_template, tools=wanted)
        conversation = [_read(message, content_format(template)) for message in messages]
        arguments = {
            **(template_arguments or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        return self.encode_conversation(conversation, wanted, template, arguments)

    def encode_conversation(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template: str,
        arguments: Mapping[str, Any],
        max_chars: int | None = None,
    ) -> list[int]:
        """Encode messages as vLLM reads them, and tools as the template is to see them.

        `arguments` hold `add_generation_prompt` and `continue_final_message`; the text may have `max_chars` letters,
        None for any number. ValueError if there are no messages, they are too long, or the template refuses them.
        """
        if not conversation:
            raise ValueError("messages are empty; at least one was wanted")
        broken = partial(self._markers.broken, named=named(template))
        try:
            turns = _without_developer(conversation, template)
            text = self._tokenizer.apply_chat_template(
                [
                    {key: broken(value, own=turn["role"] == "assistant" and key in OWN) for key, value in turn.items()}
                    for turn in turns
                ],
                tools=broken(tools),
                chat_template=template,
                tokenize=False,
                **{name: broken(value) for name, value in arguments.items()},
            )
        except Exception as error:
            raise ValueError(f"the chat template refuses the messages: {error}") from error
        if max_chars is not None and len(text) > max_chars:
            raise ValueError(f"the chat is a text of {len(text)} characters; the context length takes {max_chars}")
        return self._markers.encode(text)

    def encode_text(self, text: str) -> list[int]:
        """Encode a text in which no token is special: all of it is plain."""
        return self._markers.encode_plain(text)

    def encode_answer(self, text: str) -> list[int]:
        """Encode what the assistant wrote: tokens that are special or end an answer are plain, others its own."""
        return self._markers.encode_own(text)

    def encode_document(self, text: str) -> list[int]:
        """Encode a text to train on and the end-of-text token; ValueError if the tokenizer has none."""
        if self._tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no end-of-text token, so a text could not end")
        return [*self.encode_text(text), self._tokenizer.eos_token_id]

    def rewrite(self, token_ids: Sequence[int], change: Callable[[str], str]) -> tuple[list[int], str]:
        """See `models.markers.Markers.rewrite`."""
        return self._markers.rewrite(token_ids, change)


def _read_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool as a template is to see it: all that vLLM knows of one, in its order."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool is {str(tool)[:100]}, wanted a function with a name")
    deferred = tool.get("defer_loading")
    told = {name: function.get(name) for name in ("name", "description", "parameters")}
    given = {"defer_loading": deferred, **{name: value for name, value in function.items() if value is not None}}
    told |= {name: given[name] for name in ("strict", "defer_loading") if given.get(name) is not None}
    return {"type": "function", "function": told, **({} if deferred is None else {"defer_loading": deferred})}


def _read(message: Mapping[str, Any], form: Format) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise ValueError(f"a message has the role {role!r}, wanted a text")
    content = message.get("content")
    if not isinstance(content, str | list | tuple | None):
        raise ValueError(f"the content of a message is {content!r:.100}, wanted a text or parts of it")
    given = [] if content is None else [content] if isinstance(content, str) else content
    parts = [part for one in given if (part := _part(one, role)) is not None]
    texts = [part["text" if part["type"] == "text" else "name"] for part in parts]
    read: dict[str, Any] = {"role": role, "content": parts}
    if form == "string":
        read["content"] = "\n".join(filter(None, texts))
    elif role == "tool" and all(part["type"] == "text" for part in parts):
        read["content"] = "\n".join(texts)
    if role == "assistant":
        if calls := message.get("tool_calls"):
            read["tool_calls"] = [_call(call) for call in calls]
        thoughts = message.get("reasoning")
        thoughts = message.get("reasoning_content") if thoughts is None else thoughts
        if thoughts is not None:
            read |= {"reasoning": thoughts, "reasoning_content": thoughts}
    elif role == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    read |= {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}
    return {**read, "tools": message.get("tools")} if role == "developer" else read


def _part(part: Any, role: str) -> dict[str, Any] | None:
    """Return a part of a message's content, None where vLLM leaves it out."""
    one = {"type": "text", "text": part} if isinstance(part, str) else part
    kind = one.get("type") if isinstance(one, Mapping) else None
    if kind == "tool_reference" and isinstance(one.get("name"), str):
        return {"type": kind, "name": one["name"]}
    text = one.get(kind if kind in ("refusal", "thinking") else "text") if kind in TEXT_PARTS else ""
    if kind not in TEXT_PARTS or not isinstance(text, str | None) or one.get("uuid") is not None:
        raise ValueError(f"a part of a message has the type {kind!r}, wanted text")
    if role == "system" and kind == "text" and text is not None and text.startswith(BILLING):
        text = text.partition("\n")[2] or None
    if text is None:
        return None
    return {"type": "text", "text": text, **{name: value for name, value in one.items() if name not in PART_FIELDS}}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise ValueError(f"a tool call is {str(call)[:100]}, wanted one of a function")
    arguments = function.get("arguments")
    with suppress(json.JSONDecodeError, RecursionError):  # as vLLM does: one chat's text must not refuse what follows
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    named = {"arguments": None, "name": function.get("name"), **function}
    named["arguments"] = arguments if isinstance(arguments, dict) else {}
    ordered = {name: call[name] for name in ("id", "function", "type") if name in call}
    return {**ordered, **call, "function": named}


def _without_developer(conversation: Sequence[Mapping[str, Any]], template: str) -> Sequence[Mapping[str, Any]]:
    """Return messages without the role "developer" if a template does not know it: as one system message, first."""
    if "'developer'" in template or '"developer"' in template:
        return conversation
    if all(message["role"] != "developer" for message in conversation):
        return conversation
    renamed = [
        {**{name: value for name, value in message.items() if name != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in conversation
    ]
    systems = [message["content"] for message in renamed if message["role"] == "system"]
    if len(systems) == 1 and renamed[0]["role"] == "system":
        return renamed
    texts = [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
        for content in systems
    ]
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in renamed if message["role"] != "system")]


@lru_cache(maxsize=32)
def named(template: str) -> frozenset[str]:
    """Return the texts and fields that a template may compare with or look up; ValueError if it is no template."""
    tree = _tree(template)
    texts = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    return frozenset(texts | {read.attr for read in tree.find_all(nodes.Getattr)})


@lru_cache(maxsize=32)
def content_format(template: str) -> Format:
    """Return how a template takes content, by a loop over it, as vLLM 0.32 does (`hf._detect_content_format`)."""
    tree = _tree(template)
    messages = ["messages"]
    for name in messages:  # grows
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, name):
                if not isinstance(assign.target, nodes.Name):
                    return "string"
                if assign.target.name not in messages:
                    messages.append(assign.target.name)
    loops = list(tree.find_all(nodes.For))
    targets = [loop.target for loop in loops if any(_reads(loop.iter, name) for name in messages)]
    if not all(isinstance(target, nodes.Name) for target in targets):
        return "string"
    each = [target.name for target in targets if isinstance(target, nodes.Name)]
    handed: dict[int, set[str]] = {}  # by loop in a macro: its parameters that are handed a message's content
    for macro in tree.find_all(nodes.Macro):
        found = _handed(tree, macro, each)
        for loop in macro.find_all(nodes.For):
            handed[id(loop)] = found or handed.get(id(loop), set())
    for loop in loops:
        if any(_reads(loop.iter, name, "content") for name in each):
            return "openai" if isinstance(loop.target, nodes.Name) else "string"
        if isinstance(loop.iter, nodes.Name) and loop.iter.name in handed.get(id(loop), {"content"}):
            return "openai" if isinstance(loop.target, nodes.Name) or id(loop) not in handed else "string"
    return "string"


def _tree(template: str) -> nodes.Template:
    try:
        tree: nodes.Template = _compile_jinja_template(template).environment.parse(template)
    except TemplateSyntaxError as error:
        raise ValueError(f"the chat template can't be read: {error}") from error
    return tree


def _handed(tree: nodes.Template, macro: nodes.Macro, each: list[str]) -> set[str]:
    names = [argument.name for argument in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            given = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
            found |= {key for key, value in given if key in names and any(_reads(value, n, "content") for n in each)}
    return found


def _reads(node: nodes.Node | None, name: str, field: str = "") -> bool:
    """Return whether an expression is a variable, or a field of it: filtered, tested or sliced at most."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if field:
        match node:
            case nodes.Getitem(arg=nodes.Const(value=key)) | nodes.Getattr(attr=key) if key == field:
                node = node.node
            case _:
                return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
