"""Ask a running service with the stock clients that people bring, and print what came of it.

    make clients URL=http://127.0.0.1:PORT KEY=…

runs it in an environment of its own, which has the clients and nothing of redraft.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import anthropic
import litellm
import llm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI

MODEL = "target"
NO_TOOLS = "no tool_parser is set"
SAID = [{"role": "user", "content": "What is two and two?"}]
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "string", "maxLength": 8}},
    "required": ["sum"],
    "additionalProperties": False,
}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
# vLLM's command line asks for a package "vllm", which a CPU's build is not called.
BENCH = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}

URL, KEY = sys.argv[1].rstrip("/"), sys.argv[2]
CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
CLAUDE = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
COMPLETIONS = CLIENT.chat.completions


CHOICE = {"type": "function", "function": {"name": "add"}}
SHORT = {"model": MODEL, "messages": SAID, "max_tokens": 16}
LONG = {**SHORT, "max_tokens": 256}
RESPONSE = {"model": MODEL, "input": "What is two and two?", "max_output_tokens": 16}
HERE = {"model": MODEL, "api_key": KEY, "max_tokens": 16}


def last_of(stream: Any) -> Any:
    with stream as events:
        return list(events)[-1]


def structured() -> object:
    return json.loads(COMPLETIONS.create(**LONG, response_format=FORM).choices[0].message.content)["sum"]


def tools() -> object:
    made = COMPLETIONS.create(**LONG, tools=[{"type": "function", "function": FUNCTION}], tool_choice=CHOICE)
    return json.loads(made.choices[0].message.tool_calls[0].function.arguments)["sum"]


def responses_tools() -> object:
    asked = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "add"}}
    made = CLIENT.responses.create(**{**RESPONSE, "max_output_tokens": 256}, **asked)
    return json.loads(made.output[0].arguments)["sum"]


def messages_tools() -> object:
    asked = {"tools": [{"name": "add", "input_schema": SCHEMA, "strict": True}]}
    return CLAUDE.messages.create(**LONG, **asked, tool_choice={"type": "tool", "name": "add"}).content[0].input["sum"]


def litellm_by(provider: str, base: str) -> object:
    made = litellm.completion(f"{provider}/{MODEL}", SAID, api_base=base, api_key=KEY, max_tokens=16)
    return made.choices[0].message.content


def llm_prompt() -> object:
    named = f"{{model_id: mine, model_name: {MODEL}, api_base: {URL}/v1, api_key_name: mine}}"
    (Path(os.environ["LLM_USER_PATH"]) / "extra-openai-models.yaml").write_text(f"- {named}\n")
    return llm.get_model("mine").prompt("What is two and two?", max_tokens=16, key=KEY).text()


def langchain_stream() -> object:
    return "".join(str(part.content) for part in ChatAnthropic(base_url=URL, **HERE).stream("Two and two?"))


def vllm_bench() -> object:
    asked = ["--base-url", URL, "--model", MODEL, "--tokenizer", sys.argv[3], "--dataset-name", "random"]
    sizes = ["--random-input-len", "16", "--random-output-len", "16", "--num-prompts", "8", "--skip-chat-template"]
    argv = [sys.argv[4], "-c", BENCH, *asked, *sizes]
    told = subprocess.run(argv, env={**os.environ, "OPENAI_API_KEY": KEY}, capture_output=True, text=True, check=True)
    return next(line for line in told.stdout.splitlines() if "Successful requests" in line)


ASKED: dict[str, dict[str, Callable[[], object]]] = {
    "openai": {
        "chat": lambda: COMPLETIONS.create(**SHORT).choices[0].message.content,
        "chat_stream": lambda: last_of(COMPLETIONS.create(**SHORT, stream=True)).choices[0].finish_reason,
        "completions": lambda: CLIENT.completions.create(model=MODEL, prompt="2 and 2", max_tokens=16).choices[0].text,
        "structured": structured,
        "tools": tools,
        "responses": lambda: CLIENT.responses.create(**RESPONSE).output_text,
        "responses_stream": lambda: last_of(CLIENT.responses.stream(**RESPONSE)).type,
        "responses_tools": responses_tools,
    },
    "anthropic": {
        "messages": lambda: CLAUDE.messages.create(**SHORT).content[0].text,
        "messages_stream": lambda: last_of(CLAUDE.messages.stream(**SHORT)).type,
        "messages_tools": messages_tools,
    },
    "litellm": {
        "chat": lambda: litellm_by("openai", f"{URL}/v1"),
        "messages": lambda: litellm_by("anthropic", URL),
    },
    "llm": {"prompt": llm_prompt},
    "langchain-openai": {"chat": lambda: ChatOpenAI(base_url=f"{URL}/v1", **HERE).invoke("Two and two?").content},
    "langchain-anthropic": {"stream": langchain_stream},
    "vllm": {"bench": vllm_bench} if len(sys.argv) > 4 else {},
}


def main() -> int:
    """Print a row for each thing asked, and return how many failed."""
    num_failed = 0
    for package, asked in ASKED.items():
        for name, ask in asked.items():
            began_s = time.monotonic()
            try:
                told = f"ok: {ask()!s:.60}"
            except Exception as error:  # noqa: BLE001 - what a client raises has no common class, and is the result
                is_told = NO_TOOLS in str(error)  # of a target whose chat template shows no calls
                told = f"{'refused' if is_told else 'failed'}: {type(error).__name__}: {error!s:.300}"
                num_failed += not is_told
            number = version(package) if package != "vllm" else "bench serve"
            print(f"| {package} {number} | {name} | {told!r} | {time.monotonic() - began_s:.1f} s |", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main() > 0)
