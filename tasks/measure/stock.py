"""vLLM's own OpenAI endpoint, started as a user would who had no redraft: what a served pair has to beat.

It has the service's vLLM, weights, number format, threads and limits, is compiled, and is asked by the same client.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from infra.home import SERVED_NAME
from infra.machine import SUFFIX_TREES, openmp_preload, suffix_version
from infra.processes import Child, answers, wait_until
from infra.registry import open_registry
from infra.settings import Settings, plain_path
from models.core.drafting.draft_families import family_of
from models.core.layers.kernels import engine_dtype
from models.drafts import ngram
from models.engines.vllm import SPLIT_KV, Params, child_environment
from models.recipe import Recipe
from tasks.measure.endpoint import ChatServer
from tasks.measure.run import Served

LOOPBACK = "127.0.0.1"  # where it needs no key
# A cold start compiles for minutes.
START_TIMEOUT_S = 900.0
FORGET_TIMEOUT_S = 30.0  # keys of requests that have just ended are held for a moment
PLAIN = "vLLM"
SERVED_DRAFT = f"{PLAIN} with the served draft"
BY_BATCH_SIZE = f"{SERVED_DRAFT}, K by batch size"
# Up to so many sequences K tokens are drafted, and one up to so many; above them none. What an operator might guess:
# nothing was tuned.
MANY_TOKENS_UP_TO, ONE_UP_TO = 4, 16
SUFFIX, SUFFIX_METHOD = f"{PLAIN} with suffix", "suffix"


class Stock(ChatServer):
    def __init__(
        self, recipe: Recipe, settings: Settings, target_dir: Path, speculation: Mapping[str, Any] | None = None
    ) -> None:
        """Say what is to run, with which `speculative_config` of vLLM's; None is no draft.

        The log and the compiled graphs stay in the home, for a later start. ValueError if the recipe has another
        engine.
        """
        super().__init__(LOOPBACK, None, recipe.generate.max_tokens)
        if not isinstance(recipe.engine, Params):
            raise ValueError(f"recipe {recipe.name} has engine {recipe.engine.name}, wanted vllm to compare it with")
        self._engine, self._settings = recipe.engine, settings
        self._target_dir, self._speculation = target_dir, speculation

    def begin(self) -> None:
        """Start it, which compiles, and return at once."""
        arguments: dict[str, Any] = {
            "model": str(self._target_dir),
            "served_model_name": SERVED_NAME,
            "host": self.host,
            "port": self.port,
            "dtype": engine_dtype(self._engine, self._settings.device),
            "max_model_len": self._engine.max_model_len,
            "max_num_seqs": self._engine.max_num_seqs,
            **self._engine.extra,
        }
        if self._speculation is not None:
            arguments |= {"speculative_config": self._speculation, "per_request_spec_decode_metrics": "detailed"}
        argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *as_flags(arguments)]
        environment = {
            **child_environment(self._engine),
            **openmp_preload(),
            "VLLM_CACHE_ROOT": str(plain_path(self._settings.cache) / "stock"),
            "VLLM_SERVER_DEV_MODE": "1",  # adds the route that empties the prefix cache, among others
            SPLIT_KV: "1",  # as shipped
        }
        if self._speculation is not None and self._speculation.get("method") == SUFFIX_METHOD:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SUFFIX_TREES), os.environ.get("PYTHONPATH")]))
        self._child = Child.start(argv, environment, self._settings.home / "logs" / "stock.log", "vLLM's own endpoint")

    def start(self) -> None:
        """See the base class; what `begin` started is only waited for."""
        if self._child is None:
            self.begin()
        try:
            wait_until(lambda: answers(f"{self.url}/health"), START_TIMEOUT_S, self._child, f"{self.url}/health")
        except BaseException:
            self.stop()
            raise

    def forget(self) -> None:
        """Empty the prefix cache; TimeoutError if requests run for long."""

        def emptied() -> bool:
            answer = httpx.post(f"{self.url}/reset_prefix_cache", timeout=FORGET_TIMEOUT_S, trust_env=False)
            return bool(answer.raise_for_status().json()["success"])

        wait_until(emptied, FORGET_TIMEOUT_S, self._child, "an empty prefix cache of vLLM's own endpoint")


def as_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as the command line of vLLM's endpoint takes them."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def ngram_speculation(num_draft_tokens: int) -> dict[str, Any]:
    """Return what vLLM's `speculative_config` says for its own prompt lookup, which needs no draft."""
    params = ngram.Params()
    return {
        "method": "ngram",
        "prompt_lookup_min": params.min_tokens,
        "prompt_lookup_max": params.max_tokens,
        "num_speculative_tokens": num_draft_tokens,
    }


def speculations(num_draft_tokens: int, served: Served, settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the ways in which vLLM drafts by itself, by side; suffix trees choose their own number of tokens."""
    ways: dict[str, dict[str, Any]] = {f"{PLAIN} with ngram": ngram_speculation(num_draft_tokens)}
    if suffix_version() is not None:
        ways[SUFFIX] = {"method": SUFFIX_METHOD}
    registry = open_registry(settings)
    for number in sorted({1, served.champion}):
        files = registry.download(registry.get("draft", number), settings.cache)
        name = SERVED_DRAFT if number == served.champion else f"{PLAIN} with the first draft"
        ways[name] = {**family_of(files).vllm_config(files), "num_speculative_tokens": num_draft_tokens}
    return ways


def by_batch_size(speculation: Mapping[str, Any], max_num_seqs: int) -> dict[str, Any]:
    """Return a draft's `speculative_config` with vLLM's static table: fewer tokens where more sequences run."""
    ends = [
        (MANY_TOKENS_UP_TO, speculation["num_speculative_tokens"]),
        (ONE_UP_TO, 1),
        (max(max_num_seqs, ONE_UP_TO + 1), 0),
    ]
    starts = (1, *(end + 1 for end, _ in ends))
    table = [[start, *end] for start, end in zip(starts, ends, strict=False)]
    return {**speculation, "num_speculative_tokens_per_batch_size": table}
