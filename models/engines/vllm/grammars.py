"""Compiles what a client wants an answer's form to be in a process of its own, before the engine sees the request.

A schema, a grammar or a regex is a program for a compiler: a small one may take all memory, all time, or the process.
So each is first compiled, and asked for its first tokens, in a child that may take so much memory and time and no more.
The child is a fork of one that has read the vocabulary, so a new one costs milliseconds. What it compiled the engine
compiles too, with the same compiler; it is known then to end soon. Run as a program this module is the parent of forks.

Of a string whose length a schema bounds, xgrammar lets control characters through as they are, which are no JSON; the
engine is given such a schema as the grammar that xgrammar makes of it, without them.
"""

import asyncio
import copy
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import xgrammar
from vllm.config import VllmConfig
from vllm.config.utils import replace
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from models.engines.vllm.fields import end_with
from models.serving import Structured

MIB = 1 << 20
# The engine's front compiles without the vocabulary, between the tokens of others: only what takes it so long, in the
# quickest of some tries, for a neighbour or a first use can make one of them slow.
MOST_CHECKING_S, CHECKS = 0.05, 3
MOST_REMEMBERED = 256
TOO_LONG, TOO_MUCH_MEMORY = "it takes too long", "it takes too much memory"
# What xgrammar 0.2 writes for a character of a string with a length, and what JSON has in its place.
ANY_CHARACTER, JSON_CHARACTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
LENGTHS = ('"minLength"', '"maxLength"')
BAD_ALLOC = "std::bad_alloc"  # which reaches Python as another error than MemoryError
LENGTH = struct.Struct("<I")


class Grammars:
    """Takes or refuses what constrains an answer.

    Its process is started with the first request that needs it, and anew after it ended.
    """

    def __init__(self, config: VllmConfig, bounds: Structured) -> None:
        self._config, self._bounds = config, bounds
        self._child: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._taken: OrderedDict[str, StructuredOutputsParams] = OrderedDict()

    async def require(self, wanted: StructuredOutputsParams) -> StructuredOutputsParams:
        """Return what the engine can be given for this, see `as_json`.

        VLLMValidationError if such answers are not given here, or if this is too large, too deep, makes no sense, or
        takes more than it may.
        """
        bounds = self._bounds
        if not bounds.enabled:
            raise VLLMValidationError(
                "answers of a given form (response_format, structured_outputs, tool_choice other than auto) are not "
                "given here: the recipe has to set enabled in [serve.structured]",
                parameter="response_format",
            )
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        spec = {name: value for name in kinds if (value := getattr(wanted, name)) is not None}
        text = json.dumps(spec, sort_keys=True)
        if len(text.encode()) > bounds.max_bytes:
            raise VLLMValidationError(f"the form of the answer takes more than {bounds.max_bytes} bytes")
        _require_bounded(spec, bounds)
        if text in self._taken:
            self._taken.move_to_end(text)
            return copy.deepcopy(self._taken[text])
        async with self._turn:
            verdict = await self._ask(wanted)
        if verdict != "ok":
            raise VLLMValidationError(f"the form of the answer can't be used: {verdict}")
        self._taken[text] = as_json(wanted)
        if len(self._taken) > MOST_REMEMBERED:
            self._taken.popitem(last=False)
        return copy.deepcopy(self._taken[text])

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    async def _ask(self, wanted: StructuredOutputsParams) -> str:
        asking = asyncio.create_task(asyncio.to_thread(self._compiled, wanted))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:  # the client left; its verdict must not be taken for the next one's
            await asyncio.wait({asking})
            raise

    def _compiled(self, wanted: StructuredOutputsParams) -> str:
        """Return the child's verdict; the child itself ends what takes too long."""
        try:
            if self._child is None or self._child.poll() is not None:
                self.close()
                self._child = self._started()
            return _told(self._child, wanted)
        except (OSError, EOFError):
            self.close()
            return "it could not be compiled"

    def _started(self) -> "subprocess.Popen[bytes]":
        path = os.pathsep.join(entry for entry in sys.path if entry)
        own = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        argv = [sys.executable, "-m", __name__]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **own})
        _told(child, (self._config, self._bounds))
        return child


def as_json(wanted: StructuredOutputsParams) -> StructuredOutputsParams:
    """Return a form whose strings are JSON also where a schema, of the answer or in its tags, bounds their length."""
    text = wanted.structural_tag if wanted.json is None else wanted.json
    text = text if isinstance(text, str | None) else json.dumps(text)
    if text is None or not any(name in text for name in LENGTHS) or "structures" in json.loads(text):
        return wanted
    make = xgrammar.Grammar.from_structural_tag if wanted.json is None else xgrammar.Grammar.from_json_schema
    grammar = str(make(text)).replace(ANY_CHARACTER, JSON_CHARACTER)
    return replace(wanted, json=None, structural_tag=None, grammar=grammar)


def _told(child: "subprocess.Popen[bytes]", value: object) -> str:
    """Send something to the child and return what it says; OSError or EOFError if it ended."""
    assert child.stdin is not None and child.stdout is not None
    data = pickle.dumps(value)
    child.stdin.write(LENGTH.pack(len(data)) + data)
    child.stdin.flush()
    said = child.stdout.readline()
    if not said:
        raise EOFError("the process that compiles has ended")
    return said.decode().strip()


def _require_bounded(spec: Any, bounds: Structured) -> None:
    """Refuse what is nested too deeply, in JSON within text too, and patterns that are too long."""
    level, patterns = [spec], []
    for _ in range(bounds.max_depth + 3):  # the spec itself, its schema, and one for leaves
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                patterns += [one for name, one in value.items() if name in ("pattern", "regex")]
                named = value.get("patternProperties")
                patterns += list(named) if isinstance(named, dict) else []
                below += [_parsed(name, one) for name, one in value.items()]
            elif isinstance(value, list):
                below += value
        if not below:
            break
        level = below
    else:
        raise VLLMValidationError(f"the form of the answer is nested more than {bounds.max_depth} deep")
    if any(isinstance(one, str) and len(one) > bounds.max_regex for one in patterns):
        raise VLLMValidationError(f"a pattern of the answer's form is longer than {bounds.max_regex} characters")


def _parsed(name: str, value: Any) -> Any:
    if name not in ("json", "structural_tag") or not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise VLLMValidationError("the form of the answer is not valid JSON") from None


class _Compiler:
    def __init__(self, config: VllmConfig) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        tokenizer = cached_tokenizer_from_config(model_config=config.model_config)
        self._backend = XgrammarBackend(config, tokenizer=tokenizer, vocab_size=config.model_config.get_vocab_size())
        for first in ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}}}, {"regex": "[a-z]"},
                      {"choice": ["a"]}, {"grammar": 'root ::= "a"'}):  # fmt: skip
            self.compile(StructuredOutputsParams(**first))  # so that no client's form is the first use of its kind

    def compile(self, wanted: StructuredOutputsParams) -> str:
        """Return "ok", or why not."""
        from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar
        from vllm.v1.structured_output.request import get_structured_output_key

        try:
            for _ in range(CHECKS):
                params = SamplingParams(structured_outputs=copy.deepcopy(wanted))
                began_s = time.process_time()
                validate_xgrammar_grammar(params)
                if time.process_time() - began_s <= MOST_CHECKING_S:
                    break
            else:
                return TOO_LONG
            assert params.structured_outputs is not None
            grammar = self._backend.compile_grammar(*get_structured_output_key(as_json(params.structured_outputs)))
            first = self._backend.allocate_token_bitmask(1)
            grammar.fill_bitmask(first, 0)
            if not first.any():
                return "no token may come first"
        except MemoryError:
            return TOO_MUCH_MEMORY
        except Exception as error:  # noqa: BLE001 - what a compiler raises has no common class; its text quotes the client
            return TOO_MUCH_MEMORY if BAD_ALLOC in str(error) else "it makes no sense to the compiler"
        return "ok"


def main() -> None:
    """Compile what comes on standard input, each in a fork, and write the verdicts to standard output."""
    end_with(os.getppid())
    read, write = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    config, bounds = _next(read)
    compiler = _Compiler(config)
    print("ready", file=write, flush=True)
    while (wanted := _next(read)) is not None:
        print(in_fork(compiler.compile, wanted, bounds), file=write, flush=True)


def in_fork(
    compile_form: Callable[[StructuredOutputsParams], str], wanted: StructuredOutputsParams, bounds: Structured
) -> str:
    """Return what a fork says, or why it ended without a word: it took more time or memory than it may."""
    answer, told = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            os.close(answer)
            end_with(parent)
            resource.setrlimit(resource.RLIMIT_AS, (_used_bytes() + bounds.max_memory_mib * MIB,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(told, compile_form(wanted).encode())
        finally:
            os._exit(0)
    os.close(told)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, bounds.timeout_s)
    began_s = time.monotonic()
    with os.fdopen(answer, "rb") as said:
        verdict = said.read()
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.waitpid(pid, 0)
    if not verdict:
        return TOO_LONG if time.monotonic() - began_s >= bounds.timeout_s else TOO_MUCH_MEMORY
    return verdict.decode()


def _used_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _next(pipe: Any) -> Any:
    """Return what the service sent next, None at its end."""
    head = pipe.read(LENGTH.size)
    return pickle.loads(pipe.read(LENGTH.unpack(head)[0])) if len(head) == LENGTH.size else None  # noqa: S301 - ours


if __name__ == "__main__":
    main()
