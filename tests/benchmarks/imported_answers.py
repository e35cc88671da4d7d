"""How often answers that were imported are told to be unlike the target's: its own ones never should, people's should.

    python -m tests.benchmarks.imported_answers TARGET --data FOLDER [--seeds 20] [--found FILE]

FOLDER holds files of chats with a person's answer (`reference`), of each of which the first hundred are read. People's
answers are compared as `tasks.stages.samples` does. In each seed the target answers the same prompts at temperature 1,
and its answers stand for imported ones. FILE keeps a line for each seed, so that a run that was broken off goes on from
there. Prints a line for each file, and one JSON line. Beside each difference stand the mean log-probability of a
token and the target's entropy at it, since people's words can be as likely as the target's own and still not be such.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from infra.machine import describe_machine
from models.chats import ChatEncoder
from models.core.checkpoints.loading import load_model
from models.core.layers.kernels import fast_dtype
from models.core.learning.answering import MOST_TOKENS, NUM_PROMPTS, answer, compare, unlike
from models.core.learning.hidden import Sample
from models.targets import stop_ids
from models.types import Estimate

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


@torch.inference_mode()
def likely(model: PreTrainedModel, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean log-probability of a token of the answers, and the model's mean entropy at their places."""
    told, entropies = [], []
    for one in samples:
        said = torch.tensor(one.completion_ids[:MOST_TOKENS])
        read = torch.tensor([[*one.prompt_ids, *said.tolist()]])
        law = model(input_ids=read, logits_to_keep=len(said) + 1).logits[0, :-1].float().log_softmax(-1)
        told.append(law.gather(-1, said[:, None])[:, 0])
        entropies.append(-(law.exp() * law).sum(-1))
    return {name: round(float(torch.cat(of).mean()), 3) for name, of in (("log_prob", told), ("entropy", entropies))}


def figures(found: Estimate) -> list[float]:
    """Return a difference and the ends of its interval."""
    return [round(one, 3) for one in (found.value, found.low, found.high)]


def main() -> None:
    """Compare, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--found", type=Path, help="file of what earlier runs found, which is gone on from")
    given = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(given.target)
    model, stops = load_model(given.target, fast_dtype("cpu"), "cpu"), stop_ids(given.target)
    known: dict[str, Any] = {}
    if given.found is not None and given.found.exists():
        known = dict(json.loads(line) for line in given.found.read_text().splitlines())
    rows = {}
    for domain in DOMAINS:
        people, own = written(given.data / f"{domain}.jsonl", tokenizer, tokenizer.eos_token_id), []
        for seed in tqdm(range(given.seeds), domain, mininterval=10):
            name = f"{given.target.resolve()} {domain} {seed}"
            if name not in known:
                rng = torch.Generator().manual_seed(seed)
                said = answer(model, people, [MOST_TOKENS] * len(people), stops, MAX_LEN, rng)
                known[name] = compare(model, said).model_dump() | likely(model, said)
                if given.found is not None:
                    with given.found.open("a") as file:
                        file.write(json.dumps([name, known[name]]) + "\n")
            own.append(known[name])
        estimates = [Estimate(value=one["value"], low=one["low"], high=one["high"]) for one in own]
        theirs = compare(model, people)
        rows[domain] = {
            "people": [*figures(theirs), unlike(theirs)],
            "people_likely": likely(model, people),
            "own_told_unlike": sum(map(unlike, estimates)),
            "own_least_upper_bound": round(min(one.high for one in estimates), 3),
            "own": round(sum(one.value for one in estimates) / given.seeds, 3),
            "own_likely": {
                name: round(sum(one[name] for one in own) / given.seeds, 3) for name in ("log_prob", "entropy")
            },
            "of": given.seeds,
        }
        print(domain, rows[domain], flush=True)
    print(json.dumps({"figures": rows, "machine": describe_machine()}))


if __name__ == "__main__":
    main()
