"""What can be known of a chat template without running it."""

from functools import lru_cache
from typing import Literal

from jinja2 import TemplateSyntaxError, nodes
from transformers.utils.chat_template_utils import _compile_jinja_template

Format = Literal["string", "openai"]


@lru_cache(maxsize=32)
def named(template: str) -> frozenset[str]:
    """Return the texts and fields that a template may compare with or look up, such as "user" and "content".

    Raises:
        ValueError: it is no template.
    """
    tree = _tree(template)
    texts = {const.value for const in tree.find_all(nodes.Const) if isinstance(const.value, str)}
    return frozenset(texts | {read.attr for read in tree.find_all(nodes.Getattr)})


@lru_cache(maxsize=32)
def content_format(template: str) -> Format:
    """Return how a template takes the content of messages: as text, or as OpenAI's list of parts.

    Decided as vLLM 0.32 does (`vllm.renderers.hf._detect_content_format`): by a loop over the content of a message.

    Raises:
        ValueError: it is no template.
    """
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
    """Return the parameters of a macro that some call hands the content of a message."""
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
        if isinstance(node, nodes.Getitem):
            same = isinstance(node.arg, nodes.Const) and node.arg.value == field
        else:
            same = isinstance(node, nodes.Getattr) and node.attr == field
        if not same:
            return False
        assert isinstance(node, nodes.Getitem | nodes.Getattr)
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
