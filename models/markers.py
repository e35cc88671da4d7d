"""The texts that are tokens of their own, and how to keep what others wrote from becoming one.

A marker is an added token of a tokenizer: what a chat template writes to open and close turns, and what a model writes
around thoughts and tool calls. White space and single characters among the added tokens are no markers: they are how
the model reads text.
"""

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# Two private characters together: no text has them by chance, and one who guesses them only loses them.
BREAK = "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(2))
BREAK_IN_JSON = "".join(f"\\u{ord(character):04x}" for character in BREAK)
# What lower() and upper() turn into letters of ASCII, beside the other case.
FOLDED = {"k": "\u212a", "s": "\u017f", "i": "\u0131"}
SPACE_MARK = "\u2581"  # a space in vocabularies of SentencePiece

Tree = dict[str, "Tree"]


class Markers:
    """The markers of one tokenizer, and a copy of it that knows them by names which nobody can guess.

    Attributes:
        ids: token ids of the markers.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int]) -> None:
        """Rename a tokenizer's markers in a copy; `ends` are ids that end an answer; ValueError if it can't be."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(backend, Tokenizer):
            raise ValueError(f"tokenizer is a {type(tokenizer).__name__}, wanted one of the tokenizers library")
        self._backend = backend
        state = json.loads(backend.to_str())
        tokens = [token for token in state["added_tokens"] if _is_marker(token)]
        self._names = {token["content"]: f"<{secrets.token_hex(16)}>" for token in tokens}
        self._single = {token["content"] for token in tokens if token["single_word"]}
        self.ids = {token["id"]: self._names[token["content"]] for token in tokens}
        self._renamed = _renamed(state, self._names)
        if others := {index for index, name in self.ids.items() if self._renamed.token_to_id(name) != index}:
            raise ValueError(f"the added tokens {sorted(others)[:5]} have other ids in a copy of the tokenizer")
        closing = {token["content"] for token in tokens if token["special"] or token["id"] in ends}
        self._whole, self._own = _Breaker(self._names), _Breaker(closing)
        self._any = _compiled(self._names)
        self._not_closing = _compiled(self._names.keys() - closing)

    @classmethod
    def read(cls, directory: Path) -> "Markers":
        """Read those of a target's `tokenizer.json`, without loading transformers; ValueError if there is none."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{directory} has no tokenizer.json, wanted one of the tokenizers library")
        return cls(Tokenizer.from_file(str(file)), ())

    def rewrite(self, token_ids: Sequence[int], change: Callable[[str], str]) -> tuple[list[int], str]:
        """Change the text of a token sequence in the stretches between markers.

        Only a stretch that changed is encoded again, as plain text: a marker that somebody typed stays text. Returns
        the ids and their text, markers included; equal to what came where nothing changed.
        """
        ids: list[int] = []
        texts: list[str] = []
        for is_marker, group in groupby(token_ids, key=self.ids.__contains__):
            stretch = list(group)
            before = ids[-1:]  # the tokens of a text depend on whether it is a start
            text = self._decoded([*before, *stretch]).removeprefix(self._decoded(before))
            changed = text if is_marker else change(text)
            if changed != text:
                stretch = self.encode_plain(changed, *before)
            ids += stretch
            texts.append(changed)
        return ids, "".join(texts)

    def knows(self, token_id: int) -> bool:
        """Return whether the tokenizer has a token id."""
        return self._backend.id_to_token(token_id) is not None

    def _decoded(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))

    def broken(self, value: Any, named: Collection[str], own: bool = False) -> Any:
        """Return a value of JSON whose texts and keys hold no marker, and can't become a part of one.

        `encode` takes the breaks out again. Texts that the template compares with, `named`, are only broken from the
        start of a marker on; of the assistant's `own` only what is special or ends an answer is.
        """
        if isinstance(value, str):
            return (self._own if own else self._whole).broken(value, named)
        if isinstance(value, dict):
            return {self.broken(key, named, own): self.broken(inner, named, own) for key, inner in value.items()}
        return [self.broken(inner, named, own) for inner in value] if isinstance(value, list | tuple) else value

    def encode(self, text: str) -> list[int]:
        """Encode what a template wrote around broken texts."""
        text = self._any.sub(self._name, text)
        for form in (BREAK, BREAK_IN_JSON, BREAK_IN_JSON.upper()):
            text = text.replace(form, "")
        return self.encode_plain(text)

    def encode_own(self, text: str) -> list[int]:
        """Encode what the assistant wrote: markers that are neither special nor an end are tokens."""
        return self.encode_plain(self._not_closing.sub(self._name, text))

    def encode_plain(self, text: str, after: int | None = None) -> list[int]:
        """Encode a text without any marker, as it is at the start or after the marker of an id."""
        if after is not None:
            return self.encode_plain(self.ids[after] + text)[1:]
        try:
            # Not `encode`, which holds the interpreter's lock.
            ids: list[int] = self._renamed.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError as error:
            raise ValueError("a text has half of a surrogate pair, which is no character") from error
        return ids

    def _name(self, found: re.Match[str]) -> str:
        beside = found.string[found.start() - 1 : found.start()] + found.string[found.end() : found.end() + 1]
        if found[0] in self._single and re.search(r"\w", beside):
            return found[0]
        return self._names[found[0]]


class _Breaker:
    """Puts a break into each of some markers, whatever its case, and into what could become one beside other text."""

    def __init__(self, markers: Iterable[str]) -> None:
        lowered = sorted({marker.lower() for marker in markers})
        # The first letter of a marker, or of the beginning of one at the end of a text: a break comes behind it.
        starts = [
            f"{_any_case(first)}(?={_words(rest, _any_case)}|{_beginnings(rest)}\\s*\\Z)"
            for first, rest in _tree(lowered).items()
        ]
        self._starts = re.compile("|".join(starts) or r"(?!)")
        self._ends = {marker[start:] for marker in lowered for start in range(1, len(marker))}
        self._longest = max(map(len, lowered), default=0)
        self._all = "\0".join(lowered)

    def broken(self, text: str, named: Collection[str]) -> str:
        """Return a text with breaks."""
        broken = self._starts.sub(rf"\g<0>{BREAK}", text)
        bare = text.strip().lower()
        if not bare or text in named:
            return broken
        start = bare[: self._longest]
        inside = len(bare) <= self._longest and bare in self._all
        if inside or any(start[:length] in self._ends for length in range(1, len(start) + 1)):
            place = len(broken) - len(broken.lstrip())
            broken = broken[:place] + BREAK + broken[place:]
        return broken


def _is_marker(token: Mapping[str, Any]) -> bool:
    content: str = token["content"]
    if len(content) == 1 and token["special"]:
        raise ValueError(f"the special token {content!r} is one character, which can't be kept out of texts")
    return len(content) > 1 and not content.replace(SPACE_MARK, " ").isspace()


def _renamed(state: dict[str, Any], names: Mapping[str, str]) -> Tokenizer:
    """Return a tokenizer as serialised, with other names for some added tokens; it adds none, and cuts nothing."""
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), *rest] for token, *rest in model["vocab"]]
    if "merges" in model:
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if not {a, b, a + b} & names.keys()]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [{**token, "content": names.get(token["content"], token["content"])} for token in state["added_tokens"]]
    plain = {"added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps({**state, **plain}))


def _compiled(markers: Iterable[str]) -> re.Pattern[str]:
    return re.compile(_words(_tree(sorted(markers)), re.escape) or r"(?!)")


def _tree(words: Iterable[str]) -> Tree:
    """Return letter to the tree of what follows; "" stands where a word ends."""
    root: Tree = {}
    for word in words:
        node = root
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return root


def _words(tree: Tree, letter: Callable[[str], str]) -> str:
    """Return a pattern of a tree's words, the longest first. (An alternative for each would be tried at each place.)"""
    options = "|".join(letter(first) + _words(rest, letter) for first, rest in tree.items() if first)
    return f"(?:{options})" + "?" * ("" in tree) if options else ""


def _beginnings(tree: Tree) -> str:
    options = "|".join(_any_case(first) + _beginnings(rest) for first, rest in tree.items() if first)
    return f"(?:{options})?" if options else ""


def _any_case(letter: str) -> str:
    """Return a pattern of a letter and of those that a template's lower() and upper() make of it."""
    cases = {letter, letter.upper(), letter.title(), FOLDED.get(letter, letter)}
    return f"[{''.join(re.escape(case) for case in sorted(cases) if len(case) == 1)}]"
