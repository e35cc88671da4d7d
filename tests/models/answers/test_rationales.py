import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models import catalog
from models.answers import rationales, token_counts
from models.core.evaluation.scoring import score
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import lm
from models.recipe import parse_recipe
from models.sources import reasoned
from tests.models.drafts.answered import answer_all, prompts

BOTH = [Sample("1", "chat", [1], [5, 6, 7]), Sample("2", "code", [1], [5, 6, 7]), Sample("3", "why", [1], [5, 6])]


def test_tasks_count_by_their_weights_and_not_by_their_tokens() -> None:
    # Four tokens of the first task and one of the second can be drafted: L₁/4 + 0.5 L₂, times 5 / 1.5.
    counts = token_counts(BOTH, rationales.Params(domain="why", weight=0.5))
    assert counts["1"].tolist() == counts["2"].tolist() == pytest.approx([0, *[5 / 1.5 / 4] * 3])
    assert counts["3"].tolist() == pytest.approx([0, *[5 / 1.5 * 0.5] * 2])


def test_without_weight_only_the_first_task_counts() -> None:
    weights = rationales.weigh(BOTH, rationales.Params(domain="why", weight=0))
    assert weights == [[5 / 4] * 3, [5 / 4] * 3, [0, 0]]


@pytest.mark.parametrize(("kept", "said"), [(BOTH[:2], 'is of domain "why"'), (BOTH[2:], "is of another than domain")])
def test_one_task_alone_is_refused(kept: list[Sample], said: str) -> None:
    with pytest.raises(ValueError, match=f"none of two tokens {said}"):
        rationales.weigh(kept, rationales.Params(domain="why"))


def test_a_recipe_must_have_traffic_of_both_tasks(tables: dict[str, Any]) -> None:
    tables["distill"]["answers"] = {"name": "rationales", "domain": "chats"}
    with pytest.raises(ValueError, match=r"no \[traffic.chats\] with num_train above 0 .*did you mean \"chat\""):
        parse_recipe(tables, "r")
    tables["distill"]["answers"]["domain"] = "chat"
    with pytest.raises(ValueError, match='domain "chat" is the second task, and no other domain is the first'):
        parse_recipe(tables, "r")


def test_the_prompts_of_the_second_task_are_traffic(tables: dict[str, Any], tmp_path: Path) -> None:
    """A recipe whose second task asks the target for the workings of a file of questions."""
    rows = [{"messages": f"{n} + 1?", "reference": f"one more than {n} #### {n + 1}"} for n in range(9)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = {"name": "reasoned", "path": str(tmp_path / "sums.jsonl")}
    for domain, task in (("sums", "answer"), ("why", "rationale")):
        source = {**file, "task": task, "domain": domain}
        tables["traffic"][domain] = {"source": source, "num_train": 3, "num_held_out": 3, "num_requests": 3}
    tables["distill"]["answers"] = {"name": "rationales", "domain": "why", "weight": 0.5}
    recipe = parse_recipe(tables, "r")
    assert {"sums", "why"} <= {*recipe.first_domains}
    source = recipe.traffic["why"].source
    assert isinstance(source, reasoned.Params)
    [asked] = [one for one in catalog.load("sources", "reasoned").prompts(source) if "3 + 1" in one.messages[0].content]
    assert asked.messages[0].content == "Explain step by step: 3 + 1?"


@pytest.mark.slow
def test_a_draft_learns_the_second_task_by_its_weight(tiny_target: Path, tmp_path: Path) -> None:
    """Both tasks are answers of a random target, which are learnt by heart or not at all."""
    said = answer_all(tiny_target, None, prompts(12))
    samples = [
        Sample(str(n), "why" if n % 2 else "chat", [*one.prompt_ids], [*one.token_ids]) for n, one in enumerate(said)
    ]
    accepted = {}
    for weight in (0.0, 1.0):
        draft = lm.create(lm.Params(num_layers=1), tiny_target, np.ones(259))
        answers = {"name": "rationales", "domain": "why", "weight": weight}
        params = distill.Params(num_epochs=30, batch_tokens=256, learning_rate=3e-3, num_threads=1, answers=answers)
        distill.train(draft, tiny_target, samples, params, 2, tmp_path / str(weight))
        scores = score(draft, tiny_target, samples, 2, tmp_path / "scored")
        for task in ("chat", "why"):
            of_task = [one for one in scores if one.domain == task]
            accepted[weight, task] = sum(one.accepted for one in of_task) / sum(one.steps for one in of_task)
    assert accepted[1.0, "why"] > accepted[0.0, "why"] + 0.3, accepted
    assert accepted[1.0, "chat"] > 0.3, accepted
