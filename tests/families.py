"""Build, serve and refresh each pair of a target's and a draft's family that the guide says goes together.

    python -m tests.families [--output DIR] [FAMILY[/DRAFT]…]

Each pair has a home of its own, a target of small random weights, and the tutorial's commands. It ends with a line in
DIR/pairs.md, and is not tried again while that is there: a killed run goes on. Figures of random weights mean nothing.
"""

import argparse
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

from models.recipe import toml
from tests.flows.conftest import TIMEOUT_S, Cli
from tests.models.families import CAUSAL, MULTIMODAL, write_family
from tests.tasks.made import TABLES

STOP_S, POLL_S, MOST_CHARS = 120, 1.0, 300
K = int(TABLES["engine"]["num_draft_tokens"])
# Which drafts read which targets (docs/guide.md), with the keys that they require (docs/methods.md).
NO_STATES: dict[str, dict[str, Any]] = {"ngram": {}}
STATES = {**NO_STATES, "eagle3": {"vocab_size": 128}, "parallel_eagle": {"vocab_size": 128}}
ALL = {
    **STATES,
    "lm": {"num_layers": 1},
    "dflash": {"vocab_size": 128, "block_size": K + 1},
    "eagle": {"vocab_size": 0},
    "medusa": {"num_heads": K, "vocab_size": 0},
}
READS = {
    **dict.fromkeys(("llama", "qwen3", "llava"), ALL),
    **dict.fromkeys(("granite", "olmo2", "phi", "phi3", "qwen3_moe"), STATES),
    **dict.fromkeys(("gpt2", "gpt_neox", "gemma", "gemma2", "gemma3"), NO_STATES),
}


def try_pair(family: str, draft: str, folder: Path) -> str:
    """Build, serve, ask, refresh and swap a pair in an empty folder; return what came of it in a few words.

    AssertionError with what a command printed where one failed, TimeoutError where nothing was swapped.
    """
    target, recipe, trains = write_family(family, folder / "target"), folder / "mine.toml", draft not in NO_STATES
    own = {"target": {"name": "pretrained", "path": str(target)}, "draft": {"name": draft, **READS[family][draft]}}
    if trains:
        few = {"distill": {"num_epochs": 2}}
        own |= few | {"refresh": TABLES["refresh"] | few}
    kept = {name: table for name, table in TABLES.items() if name not in ("text", "demo", "distill", "refresh")}
    recipe.write_text(toml(kept | own))
    cli, said = Cli(folder / "home"), ("--recipe", str(recipe))
    cli.run("build", *said)
    with cli.start("serve", *said) as service:
        try:
            _read_until(service, "serving model")
            told = [cli.run("traffic", *said, "--domain", "code").splitlines()[0]]
            if trains:
                told += re.findall(r"^\w+: draft 2\b.*", cli.run("refresh", *said), re.MULTILINE)
                if not told[-1].startswith("promoted"):
                    cli.run("promote", "2", "--force", "to see a swap")
                _await_swap(cli)
                told.append("swapped")
        finally:
            service.send_signal(signal.SIGTERM)
            service.communicate(timeout=STOP_S)
    return "; ".join(told)


def _read_until(process: "Popen[str]", beginning: str) -> None:
    assert process.stdout is not None
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith(beginning):
            return
    raise AssertionError("".join(printed))


def _await_swap(cli: Cli) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while ", draft 2, " not in (status := cli.run("status")):
        if time.monotonic() > until_s:
            raise TimeoutError(status)
        time.sleep(POLL_S)


def main() -> int:
    """Try the pairs that the command line names, or all, and return how many failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*")
    parser.add_argument("--output", type=Path, default=Path("build/families"))
    given = parser.parse_args()
    pairs = {f"{family}/{draft}": (family, draft) for family, drafts in READS.items() for draft in drafts}
    wanted = {pair for one in given.pairs for pair in pairs if pair == one or pair.startswith(f"{one}/")} or {*pairs}
    file, num_failed = given.output / "pairs.md", 0
    given.output.mkdir(parents=True, exist_ok=True)
    done = re.findall(r"^\| (\S+) \| ok", file.read_text(), re.MULTILINE) if file.is_file() else []
    for name, (family, draft) in pairs.items():
        if name not in wanted or name in done:
            continue
        folder, started_s = (given.output / f"{family}-{draft}").absolute(), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            told = f"ok: {try_pair(family, draft, folder)}"
            shutil.rmtree(folder)
        except Exception as error:  # noqa: BLE001 - whatever failed is the pair's result; its folder stays
            told, num_failed = f"failed: {' '.join(str(error).split())[-MOST_CHARS:]}", num_failed + 1
        line = f"| {name} | {told} | {time.monotonic() - started_s:.0f} s |"
        print(line, flush=True)
        with file.open("a") as lines:
            lines.write(f"{line}\n")
    return num_failed


if __name__ == "__main__":
    assert READS.keys() == {*CAUSAL, *MULTIMODAL}
    sys.exit(main() > 0)
