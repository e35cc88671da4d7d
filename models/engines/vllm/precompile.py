"""Compile what an engine will run, before it starts.

    python -m models.engines.vllm.precompile --target DIR --params JSON

A graph follows from the configs of target and draft and not from their weights (`patches.compiled`). So a start with
any draft of the shape leaves in vLLM's cache folder what the start of the engine that serves will find. The process
must have the environment of that engine (`child_environment`) and its cache folder.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from models.engines.vllm import Params
from models.engines.vllm.engine import VllmEngine
from models.params import validate


def main(argv: Sequence[str] | None = None) -> int:
    """Start the engine, which compiles, and end it."""
    parser = argparse.ArgumentParser(prog="python -m models.engines.vllm.precompile", description="Compile ahead.")
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--draft", type=Path, help="a draft of the shape that will be served; none without it")
    parser.add_argument("--params", required=True, help="the engine's table, as JSON")
    parser.add_argument("--captures", action="store_true", help="the engine will capture hidden states")
    arguments = parser.parse_args(argv)
    params = validate(Params, json.loads(arguments.params), "--params")
    asyncio.run(_compile(arguments.target, arguments.draft, params, arguments.captures))
    return 0


async def _compile(target: Path, draft: Path | None, params: Params, captures: bool) -> None:
    engine = await VllmEngine.start(target, draft, params, serves=True, captures=captures)
    await engine.close()


if __name__ == "__main__":
    sys.exit(main())
