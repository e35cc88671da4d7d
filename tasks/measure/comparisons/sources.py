"""What a draft learns from each source of answers after it has served, at equal tokens.

All rows of a seed begin with one EAGLE-3 head of one layer. It has learnt the target's answers to half of the documents
(`tasks.measure.lesson`) and served the answers to the other half, in which the places are marked at which its tokens
were refused, as a query log tells them. From there on rows differ in whose answers to these prompts they learn, and in
nothing else; the head that learns no more is a row too. Seconds include what is written on the way.
"""

from copy import deepcopy

from models import catalog
from models.core.evaluation.acceptance import rejected_places
from models.core.evaluation.scoring import trace
from models.core.learning.hidden import Sample
from models.drafts import Draft
from tasks.measure import lesson
from tasks.measure.comparisons import Bench, Row

QUESTION = "From whose answers does a draft that has served learn most, at equal tokens?"
BASELINE = "target"
COLUMNS = {**lesson.COLUMNS, "tokens_k": "tokens learnt, thousand"}
AS_SERVED = "as served"


def rows(budget: float) -> list[Row]:
    """Return every source of one domain's answers, and no further learning; `budget` scales 96 answers twice."""
    names = catalog.names("answers")
    of_one = [name for name in names if not hasattr(catalog.load("answers", name), "require_domains")]
    return [*(Row(name, {"answers": {"name": name}}) for name in of_one), Row(AS_SERVED, {"answers": None})]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    first, then = (
        bench._replace(train={domain: of_domain[number::2] for domain, of_domain in bench.train.items()})
        for number in (0, 1)
    )
    draft = deepcopy(lesson.head(first, seed))
    costs = {"train_s": 0.0, "tokens_k": 0.0}
    if row.settings["answers"] is not None:
        training = {**lesson.TRAINING, "answers": row.settings["answers"]}
        report, train_s = lesson.learn(bench, draft, served(draft, then, seed), training, seed)
        costs = {"train_s": train_s, "tokens_k": report.num_tokens / 1000}
    return {**lesson.accepted(bench, draft, seed), **costs}


def served(draft: Draft, bench: Bench, seed: int) -> list[Sample]:
    """Return the target's greedy answers to the training part, with the places at which `draft` was refused in them."""
    samples = lesson.answered(bench, lesson.num_answers(bench), seed)
    work_dir = bench.work_dir / "served"
    traces = trace(draft, bench.target_dir, samples, lesson.NUM_DRAFT_TOKENS, work_dir, bench.device)
    refused = {one.request_id: rejected_places(one.drafted, one.accepted, [], len(one.token_ids)) for one in traces}
    return [sample._replace(rejected=refused[sample.id]) for sample in samples]
