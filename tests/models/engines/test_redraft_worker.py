"""What a rank reads of a draft and when, and what vLLM computed of its weights, which is renewed after a swap.

Without an engine: vLLM's objects stand here as far as they are read.
"""

import hashlib
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.engines.vllm.redraft_vllm import worker
from models.engines.vllm.redraft_vllm.swap import GAINS, STATE, WorkerDraft, derive, derived_errors
from models.engines.vllm.redraft_vllm.worker import WEIGHTS, DraftExtension

PARAMETERS = {"fc.weight": ["fc.weight"]}


class Rank(DraftExtension):
    """A worker with a draft of one layer, which began with the one in a folder."""

    rank = 0

    def __init__(self, start: Path) -> None:
        draft = SimpleNamespace(draft_model_config=SimpleNamespace(model=str(start)))
        self.vllm_config = SimpleNamespace(speculative_config=draft, model_config=SimpleNamespace(dtype=torch.float32))
        self.model_runner = SimpleNamespace(speculator=SimpleNamespace(model=nn.Linear(2, 2)))  # as in the V2 runner
        self.modules = nn.ModuleDict({"fc": nn.Linear(3, 2, bias=False)})
        self.device = torch.device("cpu")
        self.__dict__["_redraft_draft"] = Copying(self)

    def get_model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def get_draft_model(self) -> nn.Module:
        return self.modules


class Copying(WorkerDraft):
    """Loads without vLLM's reload, which wants vLLM's modules."""

    def load(self, weights: Any, parameters: Any) -> int:
        self._worker.modules.load_state_dict(weights)
        return len(weights)


def draft(folder: Path, value: float) -> tuple[Path, str, Tensor]:
    folder.mkdir()
    weight = torch.full((2, 3), value)
    save_file({"fc.weight": weight}, folder / WEIGHTS)
    return folder, hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(), weight


def stage(rank: Rank, version: str, folder: Path, sha256: str) -> dict[str, Any]:
    assert rank.redraft_stage(version, str(folder), sha256, PARAMETERS)["ok"]
    deadline_s = time.monotonic() + 60
    while (answer := rank.redraft_staged(version)).get("reading"):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return answer


def test_no_folder_is_read_after_staging_neither_the_new_drafts_nor_the_start_up_drafts(tmp_path: Path) -> None:
    start, _, of_start = draft(tmp_path / "start", 1.0)
    folder, sha256, weight = draft(tmp_path / "new", 2.0)
    rank = Rank(start)
    rank.modules.load_state_dict({"fc.weight": of_start})
    assert stage(rank, "2", folder, sha256)["ok"]
    shutil.rmtree(start)
    shutil.rmtree(folder)
    assert rank.redraft_commit("2")["ok"]
    assert torch.equal(rank.modules["fc"].weight, weight)
    assert rank.redraft_verify("fc.weight")["worst"] < 1e-5
    assert rank.redraft_revert() == {"rank": 0, "ok": True, "error": "", "digest": "", "version": worker.START}
    assert torch.equal(rank.modules["fc"].weight, of_start)


def test_a_loaded_draft_is_held_against_what_is_staged_without_being_replaced(tmp_path: Path) -> None:
    start, sha256, of_start = draft(tmp_path / "start", 1.0)
    rank = Rank(start)
    rank.modules.load_state_dict({"fc.weight": of_start})
    assert rank.redraft_verify("fc.weight")["error"] == "ValueError: no draft was committed"
    stage(rank, "check", start, sha256)
    assert rank.redraft_verify("fc.weight", "check")["worst"] < 1e-5
    folder, sha256, _ = draft(tmp_path / "new", 2.0)
    stage(rank, "check", folder, sha256)
    assert rank.redraft_verify("fc.weight", "check")["worst"] > 0.4
    assert rank.redraft_verify("fc.weight", "other")["error"] == "ValueError: draft other is not staged"
    assert torch.equal(rank.modules["fc"].weight, of_start)


H, WIDTH, NUM_LAYERS = 4, 3, 2


def parallel(weights: dict[str, Tensor]) -> Any:
    """Return a proposer of P-EAGLE whose modules have some weights, and whose state is older."""
    product = nn.Linear(3 * H, H, bias=False)
    product.weight = nn.Parameter(weights["fc.weight"])
    model = SimpleNamespace(combine_hidden_states=product, mask_hidden=weights["mask_hidden"])
    return SimpleNamespace(model=model, **{STATE: torch.zeros(H)})


def dflash(weights: dict[str, Tensor]) -> Any:
    """Return a proposer of DFlash whose modules have some weights, and whose stacked gains are older."""
    inner = SimpleNamespace(layers=range(NUM_LAYERS), **{GAINS: torch.ones(NUM_LAYERS, WIDTH)})

    def build() -> None:
        setattr(inner, GAINS, torch.stack([weights[name] for name in sorted(weights)]))

    inner._build_fused_kv_buffers = build
    return SimpleNamespace(model=SimpleNamespace(model=inner), **{STATE: None})


MADE = [
    (parallel, {"fc.weight": (H, 3 * H), "mask_hidden": (1, 3 * H)}, STATE),
    (dflash, {f"layers.{number}.self_attn.k_norm.weight": (WIDTH,) for number in range(NUM_LAYERS)}, GAINS),
]


@pytest.mark.parametrize(("make", "shapes", "name"), MADE)
def test_what_is_stale_is_told_and_renewed(make: Any, shapes: dict[str, tuple[int, ...]], name: str) -> None:
    rng = torch.Generator().manual_seed(0)
    weights = {key: torch.randn(shape, generator=rng) for key, shape in shapes.items()}
    drafter = make(weights)
    holder = drafter if name == STATE else drafter.model.model
    captured = getattr(holder, name)  # by a CUDA graph
    assert derived_errors(drafter, weights)[name] > 0.5
    derive(drafter)
    assert getattr(holder, name) is captured
    assert derived_errors(drafter, weights)[name] < 1e-5


def test_a_proposer_that_keeps_nothing_has_no_errors() -> None:
    drafter = SimpleNamespace(model=nn.Linear(2, 2))
    derive(drafter)
    assert derived_errors(drafter, {}) == {}


@pytest.mark.parametrize("name", ["drafter", "speculator"])
def test_what_proposes_is_found_in_both_of_vllms_model_runners(name: str) -> None:
    weights = {"fc.weight": torch.ones(H, 3 * H), "mask_hidden": torch.ones(1, 3 * H)}
    worker = SimpleNamespace(model_runner=SimpleNamespace(**{name: parallel(weights)}))
    assert WorkerDraft(worker).derived_errors(weights).keys() == {STATE}
