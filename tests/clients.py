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


def chat() -> object:
    return COMPLETIONS.create(model=MODEL, messages=SAID, max_tokens=16).choices[0].message.content


def chat_stream() -> object:
    chunks = COMPLETIONS.create(model=MODEL, messages=SAID, max_tokens=16, stream=True)
    return [chunk.choices[0].finish_reason for chunk in chunks][-1]


def completions() -> object:
    return CLIENT.completions.create(model=MODEL, prompt="Two and two", max_tokens=16).choices[0].text


def structured() -> object:
    answer = COMPLETIONS.create(model=MODEL, messages=SAID, max_tokens=256, response_format=FORM)
    return json.loads(answer.choices[0].message.content)["sum"]


def tools() -> object:
    tool = {"type": "function", "function": FUNCTION}
    choice = {"type": "function", "function": {"name": "add"}}
    made = COMPLETIONS.create(model=MODEL, messages=SAID, max_tokens=256, tools=[tool], tool_choice=choice)
    return json.loads(made.choices[0].message.tool_calls[0].function.arguments)["sum"]


def responses() -> object:
    return CLIENT.responses.create(model=MODEL, input="What is two and two?", max_output_tokens=16).output_text


def responses_stream() -> object:
    with CLIENT.responses.stream(model=MODEL, input="What is two and two?", max_output_tokens=16) as events:
        return [event.type for event in events][-1]


def responses_tools() -> object:
    asked = {"tools": [{"type": "function", **FUNCTION}], "tool_choice": {"type": "function", "name": "add"}}
    made = CLIENT.responses.create(model=MODEL, input="Two and two?", max_output_tokens=256, **asked)
    return json.loads(made.output[0].arguments)["sum"]


def messages() -> object:
    return CLAUDE.messages.create(model=MODEL, messages=SAID, max_tokens=16).content[0].text


def messages_stream() -> object:
    with CLAUDE.messages.stream(model=MODEL, messages=SAID, max_tokens=16) as events:
        return [event.type for event in events][-1]


def messages_tools() -> object:
    tool = {"name": "add", "input_schema": SCHEMA, "strict": True}
    choice = {"type": "tool", "name": "add"}
    made = CLAUDE.messages.create(model=MODEL, messages=SAID, max_tokens=256, tools=[tool], tool_choice=choice)
    return made.content[0].input["sum"]


def litellm_chat() -> object:
    made = litellm.completion(f"openai/{MODEL}", SAID, api_base=f"{URL}/v1", api_key=KEY, max_tokens=16)
    return made.choices[0].message.content


def litellm_messages() -> object:
    made = litellm.completion(f"anthropic/{MODEL}", SAID, api_base=URL, api_key=KEY, max_tokens=16)
    return made.choices[0].message.content


def llm_prompt() -> object:
    folder = Path(os.environ["LLM_USER_PATH"])
    named = f"{{model_id: mine, model_name: {MODEL}, api_base: {URL}/v1, api_key_name: mine}}"
    (folder / "extra-openai-models.yaml").write_text(f"- {named}\n")
    return llm.get_model("mine").prompt("What is two and two?", max_tokens=16, key=KEY).text()


def langchain_openai() -> object:
    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_tokens=16).invoke("Two and two?").content


def langchain_anthropic() -> object:
    made = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_tokens=16)
    return "".join(str(part.content) for part in made.stream("Two and two?"))


def vllm_bench() -> object:
    asked = ["--base-url", URL, "--model", MODEL, "--tokenizer", sys.argv[3], "--dataset-name", "random"]
    sizes = ["--random-input-len", "16", "--random-output-len", "16", "--num-prompts", "8", "--skip-chat-template"]
    argv = [sys.argv[4], "-c", BENCH, *asked, *sizes]
    told = subprocess.run(argv, env={**os.environ, "OPENAI_API_KEY": KEY}, capture_output=True, text=True, check=True)
    return next(line for line in told.stdout.splitlines() if "Successful requests" in line)


ASKED: list[tuple[str, list[Callable[[], object]]]] = [
    ("openai", [chat, chat_stream, completions, structured, tools, responses, responses_stream, responses_tools]),
    ("anthropic", [messages, messages_stream, messages_tools]),
    ("litellm", [litellm_chat, litellm_messages]),
    ("llm", [llm_prompt]),
    ("langchain-openai", [langchain_openai]),
    ("langchain-anthropic", [langchain_anthropic]),
    ("vllm", [vllm_bench] if len(sys.argv) > 4 else []),
]


def main() -> int:
    """Print a row for each thing asked, and return how many failed."""
    num_failed = 0
    for package, asked in ASKED:
        for ask in asked:
            began_s = time.monotonic()
            try:
                told = f"ok: {ask()!s:.60}"
            except Exception as error:  # noqa: BLE001 - what a client raises has no common class, and is the result
                is_told = NO_TOOLS in str(error)  # of a target whose chat template shows no calls
                told = f"{'refused' if is_told else 'failed'}: {type(error).__name__}: {error!s:.300}"
                num_failed += not is_told
            number = version(package) if package != "vllm" else "bench serve"
            print(
                f"| {package} {number} | {ask.__name__} | {told!r} | {time.monotonic() - began_s:.1f} s |", flush=True
            )
    return num_failed


if __name__ == "__main__":
    sys.exit(main() > 0)
