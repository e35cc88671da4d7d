"""What each verification rule keeps of one place's drafts, what the best rule could, and what a lossy one loses.

Places are next tokens of held-out text, one of a document, which the seed draws. p is the target's law there and q a
draft's, the target with one layer in 15 left out, both at the row's temperature and cut to their 10 likeliest tokens.
So few let everything be summed over all drafts that may come: no figure has an error of sampling but that of the
places. Drafts are drawn as the rule wants them first (`SIBLINGS`), "certain but one" where the row says so. Relaxed
acceptance of neighbours is for image tokens, and is not here.
"""

from functools import partial

import numpy as np
import torch
from torch import Tensor

from models import catalog
from models.core.checkpoints.loading import load_model
from models.core.drafting.multi_draft import exact_outcome, most_kept
from models.core.drafting.sampling import probabilities
from models.core.evaluation.spread import Mean
from models.drafts import lm
from models.engines import Sampling
from models.targets import target_config
from tasks.measure.comparisons import Bench, Row, draw

QUESTION = "How much of the drafts for a place does each verification rule keep, and how far is that from the best?"
BASELINE = "rejection, 1 draft, T 1"
COLUMNS = {
    "kept_pct": "a draft is kept, % ↑",
    "most_pct": "most that a lossless rule can keep of such drafts, %",
    "short_pct": "short of that, points ↓ (below 0: not lossless)",
    "lost": "total variation from the target, 0 to 1 ↓",
}
RULES = (
    "rejection",
    "coupled",
    "spectr",
    "without_replacement",
    "multi_draft_optimal",
    "typical",
    "knowledge_transfer",
)
TEMPERATURES = (1.0, 0.5)
NUM_DRAFTS = (2, 4)
TOP_K, NUM_PLACES, LENGTH, LAYERS_A_SKIP = 10, 32, 32, 15


def rows(budget: float) -> list[Row]:
    """Return every rule at every temperature and number of drafts; `budget` scales the places."""
    ways = [("rejection", 1, ""), ("coupled", 1, "")] + [(name, count, "") for count in NUM_DRAFTS for name in RULES]
    ways += [("rejection", count, "certain but one") for count in NUM_DRAFTS]
    return [
        Row(
            f"{name}, {count} draft{'s' * (count > 1)}{', ' * bool(siblings)}{siblings}, T {temperature:g}",
            {"method": {"name": name}, "drafts": count, "siblings": siblings, "temperature": temperature},
        )
        for temperature in TEMPERATURES
        for name, count, siblings in ways
    ]


def measure(bench: Bench, row: Row, seed: int) -> dict[str, float]:
    params = catalog.parse("verify", row.settings["method"])
    rule = catalog.load("verify", params.name)
    siblings, count = row.settings["siblings"] or rule.SIBLINGS[0], row.settings["drafts"]
    places = [*zip(*_laws(bench, Sampling(temperature=row.settings["temperature"], top_k=TOP_K), seed), strict=True)]
    outcomes = [exact_outcome(partial(rule.choose, params=params), p, q, count, siblings) for p, q in places]
    kept = [100 * float(outcome.kept) for outcome in outcomes]
    most = [100 * float(most_kept(p[None], q[None], count, siblings)) for p, q in places]
    lost = [float(outcome.lost(p)) for outcome, (p, _) in zip(outcomes, places, strict=True)]
    short = [best - one for one, best in zip(kept, most, strict=True)]
    columns = {"kept_pct": kept, "most_pct": most, "short_pct": short, "lost": lost}
    # What rounding makes of a difference that is none would else be found in every place.
    return {name: Mean([round(value, 6) for value in values]) for name, values in columns.items()}


@torch.inference_mode()
def _laws(bench: Bench, sampling: Sampling, seed: int) -> tuple[Tensor, Tensor]:
    """Return p and q [P, 2·10] float64 at places of the seed's, of the tokens that either may say there."""
    documents = draw(bench.held_out, max(LENGTH, round(NUM_PLACES * LENGTH * bench.budget)), LENGTH, seed)
    num_layers = target_config(bench.target_dir).num_hidden_layers
    target = load_model(bench.target_dir, device=bench.device)
    kept = num_layers - max(1, num_layers // LAYERS_A_SKIP)
    draft = lm.create(lm.Params(num_layers=kept), bench.target_dir, np.empty(0)).to(bench.device)
    rng = torch.Generator().manual_seed(seed)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for document in documents:
        place = int(torch.randint(len(document), (1,), generator=rng))
        read = torch.tensor([document[: place + 1]], device=bench.device)
        told = target(input_ids=read, use_cache=False).logits[0, -1]
        drafted = draft.lm_head(draft.model(input_ids=read, use_cache=False).last_hidden_state[0, -1])
        tokens = torch.cat([told.topk(TOP_K).indices, drafted.topk(TOP_K).indices])
        # A token that both have among their likeliest stands once; the other place is one that nobody says.
        again = (tokens[TOP_K:, None] == tokens[:TOP_K]).any(dim=1).cpu()
        for laws, logits in zip(found, (told, drafted), strict=True):
            law = probabilities(logits[None].double(), sampling)[0, tokens].cpu()
            law[TOP_K:][again] = 0
            laws.append(law / law.sum())
    return torch.stack(found[0]), torch.stack(found[1])
