"""How often answers that were imported are told to be unlike the target's: its own ones never should, people's should.

    python -m tests.benchmarks.imported_answers TARGET --data FOLDER

FOLDER holds files of chats with a person's answer (`reference`). From each, fifty prompts are drawn. In each seed the
target answers them anew at temperature 1: its answers of one seed stand for imported ones and are held against those of
the next seed, and people's are held against the target's as well, as `tasks.stages.imported` does. Prints a line for
each file, and one JSON line.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from infra.machine import describe_machine
from models.chats import ChatEncoder
from models.core.checkpoints.loading import load_model
from models.core.evaluation.own_answers import NUM_PROMPTS, answer, difference, mean_log_probs, read_of, unlike
from models.core.learning.hidden import Sample
from models.precision import fast_dtype
from models.targets import stop_ids

DOMAINS = ("gsm8k", "mbpp", "wikisql")
MAX_LEN = 2048


def written(file: Path, tokenizer: Any, end: int) -> list[Sample]:
    """Return chats with a person's answers, ended as the template ends one."""
    encoder, found = ChatEncoder.of(tokenizer), []
    for line in file.read_text().splitlines()[:NUM_PROMPTS]:
        chat = json.loads(line)
        said = [*encoder.encode_answer(chat["reference"]), end]
        found.append(Sample(chat["id"], chat["domain"], encoder.encode(chat["messages"]), said, 1.0))
    return found


def main() -> None:
    """Compare, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    model, stops = load_model(given.target, fast_dtype("cpu"), "cpu"), stop_ids(given.target)
    figures = {}
    for domain in DOMAINS:
        people = written(given.data / f"{domain}.jsonl", tokenizer, tokenizer.eos_token_id)
        lengths = [read_of(one, stops) for one in people]
        cut = [one._replace(completion_ids=one.completion_ids[:num]) for one, num in zip(people, lengths, strict=True)]
        theirs, before, own, by_people = mean_log_probs(model, cut), None, [], []
        for seed in tqdm(range(given.seeds + 1), domain, mininterval=10):
            said = answer(model, cut, lengths, stops, MAX_LEN, torch.Generator().manual_seed(seed))
            scored = mean_log_probs(model, said)
            by_people.append(difference(theirs, scored))
            if before is not None:
                own.append(difference(before, scored))
            before = scored
        figures[domain] = {
            "own_told_unlike": sum(map(unlike, own)),
            "own_least_upper_bound": round(min(one.high for one in own), 3),
            "people_told_unlike": sum(map(unlike, by_people[1:])),
            "people": round(sum(one.value for one in by_people[1:]) / given.seeds, 3),
            "of": given.seeds,
        }
        print(domain, figures[domain], flush=True)
    print(json.dumps({"figures": figures, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
