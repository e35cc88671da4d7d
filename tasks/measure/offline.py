"""The peers without an endpoint, in a process of their own: `python -m tasks.measure.offline JOB.json`.

A process, because the processor's threads belong to whoever is measured, and because a model that was loaded is only
really gone when its process is.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from infra.client import Answer
from infra.installed import openmp_preload
from infra.processes import Child
from models.sources import Prompt
from tasks.measure.peers import Peer, Timed, encoder, open_peers
from tasks.measure.run import Bar

POLL_S = 2.0  # seldom: the cores are being measured


class Job(BaseModel):
    """What the process is to do; it writes one line a prompt and peer to `answers`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target_dir: Path
    draft_dir: Path
    dtype: str
    num_draft_tokens: int
    max_model_len: int
    max_tokens: int
    prompts: tuple[Prompt, ...]
    answers: Path


def run_offline(job: Job, folder: Path, bar: Bar) -> list[tuple[str, Answer]]:
    """Run the process to its end and return peer and answer, in the order they were given.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "job.json"
    file.write_text(job.model_dump_json())
    argv = [sys.executable, "-m", "tasks.measure.offline", str(file)]
    rows = run_process(argv, openmp_preload(), job.answers, folder / "offline.log", "the peers' process", bar)
    return [(row["side"], Answer(**row["answer"])) for row in rows]


def run_process(
    argv: Sequence[str], environment: Mapping[str, str], answers: Path, log: Path, name: str, bar: Bar
) -> list[dict[str, Any]]:
    """Run a process that writes a line of JSON an answer to its end, and return the lines.

    Args:
        argv: the process.
        environment: variables added to this one's.
        answers: where it writes; what an earlier one left is removed.
        log: for what else it says.
        name: what messages call it.
        bar: told of the lines so far.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    answers.unlink(missing_ok=True)
    with Child.start(argv, environment, log, name) as child:
        while (code := child.poll()) is None:
            time.sleep(POLL_S)
            bar.show(_num_lines(answers))
    if code:
        raise RuntimeError(f"{name} ended with {code}\n{child.tail()}")
    return [json.loads(line) for line in answers.read_text().splitlines()]


def main() -> None:
    """Do one job."""
    job = Job.model_validate_json(Path(sys.argv[1]).read_bytes())
    encode = encoder(job.target_dir)
    peers = list(open_peers(job.target_dir, job.draft_dir, job.dtype, job.num_draft_tokens, job.max_model_len).items())
    for _, peer in peers:
        peer(encode(job.prompts[0]), job.max_tokens)  # warm: the first run allocates
    with job.answers.open("w") as file:
        for number, prompt in enumerate(job.prompts):
            turn = number % len(peers)
            for side, peer in peers[turn:] + peers[:turn]:
                answer = _answer(prompt, peer, encode(prompt), job.max_tokens)
                file.write(json.dumps({"side": side, "answer": answer.model_dump(mode="json")}) + "\n")
                file.flush()


def _answer(prompt: Prompt, peer: Peer, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
    sent_s = time.monotonic()
    timed: Timed = peer(list(prompt_ids), max_tokens)
    return Answer(
        prompt_id=prompt.id,
        domain=prompt.domain,
        status="ok",
        num_tokens=len(timed.token_ids),
        sent_s=sent_s,
        **timed._asdict(),
    )


def _num_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.is_file() else 0


if __name__ == "__main__":
    main()
