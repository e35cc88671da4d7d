"""Paged optimizer state changes where moments lie and not what is learnt."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from models.params import validate
from models.regimes import paged_state
from tests.models.regimes.world import load, train


def test_what_is_learnt_is_the_same_to_the_last_bit_and_the_state_is_counted(tiny_target: Path) -> None:
    paged, plain = load(tiny_target), load(tiny_target)
    trained = train(paged, [paged_state.Params()])
    train(plain, [])
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, paged.get_parameter(name)), name
    assert trained.figures["paged_mib"] == pytest.approx(8 * plain.num_parameters() / 2**20)


def test_moments_lie_in_a_file_that_has_no_name_any_more(model: PreTrainedModel, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    regime = paged_state.Hooks(validate(paged_state.Params, {"folder": str(tmp_path)}, "r"), torch.Generator())
    regime.hold(optimizer)
    model(torch.arange(3, 20)[None], labels=torch.arange(3, 20)[None]).loss.backward()
    optimizer.step()
    moments = [state[part] for state in optimizer.state.values() for part in ("exp_avg", "exp_avg_sq")]
    mapped = {moment.untyped_storage().data_ptr() for moment in moments}
    assert len(mapped) == 1 and all(float(moment.abs().sum()) > 0 for moment in moments[:2])
    [file] = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert int(file.split("-")[0], 16) == mapped.pop() and file.endswith("(deleted)")
    assert list(tmp_path.iterdir()) == []
