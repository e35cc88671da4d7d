import json
from pathlib import Path

import numpy as np
import pytest
import torch

from models.drafts import eagle
from models.targets import describe
from tests.conftest import shake
from tests.models.drafts.tiny import require_refused, rows_at, save_tiny

BOTH = {"feature_sampling": True, "partial_alignment": True}


def make(target: Path, scale: float = 0.0, **options: bool) -> eagle.Eagle:
    draft = eagle.create(eagle.Params(vocab_size=64, **options), target, np.arange(259))
    shake(draft, scale, seed=0)
    return draft


def test_a_feature_is_sampled_by_hand() -> None:
    """g = [3, 4] normed is g / √12.5; the embedding gates with SiLU(2) and SiLU(−1), W_down swaps them."""
    sampler = eagle.Sampler(2, 2, 0.0)
    with torch.no_grad():
        sampler.post_attention_layernorm.weight.copy_(torch.tensor([1.0, 2.0]))
        for name in ("gate_proj", "up_proj", "down_proj"):
            sampler.mlp[name].weight.copy_(torch.eye(2).flip(0) if name == "down_proj" else torch.eye(2))
        found = sampler(torch.tensor([3.0, 4.0]), torch.tensor([2.0, -1.0]))
    silu = {value: value / (1 + 2.718281828**-value) for value in (2.0, -1.0)}
    first, second = silu[2.0] * 3 / 12.5**0.5, silu[-1.0] * 2 * 4 / 12.5**0.5
    torch.testing.assert_close(found, torch.tensor([3 + second, 4 + first]))


@pytest.mark.parametrize("options", [{"feature_sampling": True}, {"partial_alignment": True}, BOTH])
def test_a_new_draft_says_what_a_new_one_without_them_says(tiny_target: Path, options: dict[str, bool]) -> None:
    plain, draft = make(tiny_target), make(tiny_target, **options)
    for one, other in zip(plain.unroll(rows_at(3, 8), 3), draft.unroll(rows_at(3, 8), 3), strict=True):
        torch.testing.assert_close(one.logits, other.logits)
        torch.testing.assert_close(one.hidden, other.hidden)


def test_what_says_a_token_is_not_what_is_aligned_nor_what_the_next_step_reads(tiny_target: Path) -> None:
    said = make(tiny_target, scale=0.1, **BOTH).unroll(rows_at(5), 3)
    changed = {}
    for half in (0, 1):
        other = make(tiny_target, scale=0.1, **BOTH)
        with torch.no_grad():
            other.layer["mlp"]["down_proj"].weight[128 * half : 128 * (half + 1)] *= 2
        changed[half] = other.unroll(rows_at(5), 3)
    for step in range(3):
        assert torch.equal(said[step].hidden, changed[0][step].hidden)
        assert not torch.allclose(said[step].logits, changed[0][step].logits)
        assert not torch.allclose(said[step].hidden, changed[1][step].hidden)
        assert torch.equal(said[step].logits, changed[1][step].logits) == (step == 0)


def test_the_options_are_kept_and_a_swap_can_not_change_them(tiny_target: Path, tmp_path: Path) -> None:
    draft = make(tiny_target, scale=0.1, **BOTH)
    plain, kept = tmp_path / "plain", tmp_path / "kept"
    for directory, one in ((plain, make(tiny_target)), (kept, draft)):
        directory.mkdir()
        eagle.save(one, directory)
    assert not json.loads((plain / "config.json").read_text()).keys() & BOTH.keys()
    again = eagle.load(kept, tiny_target)
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, tensor in draft.state_dict().items():
        stored = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(again.state_dict()[name], stored), name
    with pytest.raises(ValueError, match="differs from the served draft in feature_sampling, partial_alignment"):
        eagle.check(kept, plain, describe(tiny_target))
    message = "partial_alignment must be true or false; got 'yes'"
    require_refused(eagle, tiny_target, tmp_path / "tiny", message, partial_alignment="yes")


def test_vllm_is_not_given_what_it_does_not_compute(tiny_target: Path, tmp_path: Path) -> None:
    save_tiny(eagle, tiny_target, tmp_path / "one", served=True)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    for name in BOTH:
        message = f"family eagle have no {name}: leave it out of"
        with pytest.raises(ValueError, match=message):
            eagle.require_served(eagle.Params(vocab_size=0, **{name: True}), 3)
        (tmp_path / "one" / "config.json").write_text(json.dumps({**config, name: True}))
        with pytest.raises(ValueError, match=message):
            eagle.vllm_config(tmp_path / "one")
    eagle.require_served(eagle.Params(vocab_size=0), 3)


def test_the_engine_drafts_with_both_as_training_unrolls(tiny_target: Path) -> None:
    draft, rows, seen = make(tiny_target, scale=0.1, **BOTH), rows_at(8), []
    drafter = draft.drafter(20)

    def follow(logits: torch.Tensor) -> tuple[int, None]:
        seen.append(logits)
        return int(rows.token_ids[0, 9 + len(seen)]), None

    with torch.inference_mode():
        drafter.extend(rows.token_ids[0, :6], rows.hidden[0, :5])
        drafter.extend(rows.token_ids[0, 5:10], rows.hidden[0, 5:])
        drafter.propose(3, follow)
        for one, logits in zip(draft.unroll(rows, 3), seen, strict=True):
            torch.testing.assert_close(one.logits[0], logits, rtol=1e-3, atol=1e-3)
