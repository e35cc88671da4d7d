from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from models.core.checkpoints.loading import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.core.learning import distill
from models.drafts import Rows, dream
from models.drafts.dream import watched
from models.drafts.dream.draft import NEVER, Dream, ended, left_out
from tests.conftest import shake
from tests.models import planted
from tests.models.drafts.answered import answer_all, require_equal, tau_of
from tests.models.drafts.tiny import library_layer, require_refused


def made(target: Path, **changes: object) -> Dream:
    """Return a draft that is not new: its gates are open."""
    draft = dream.create(dream.Params(**{"vocab_size": 259} | changes), target, np.ones(259))
    shake(draft, 0.05, 0)
    with torch.no_grad():
        draft.gates.copy_(torch.tensor([0.8, -0.6]))
    return draft


def text(num_tokens: int, num_taps: int = 2) -> tuple[Tensor, Tensor]:
    """Return seeded states [1, n, taps · H] and tokens [1, n + 6], none of them an image's."""
    rng = torch.Generator().manual_seed(0)
    return torch.randn(1, num_tokens, num_taps * 128, generator=rng), torch.randint(
        20, 60, (1, num_tokens + 6), generator=rng
    )


def of_features(draft: Dream, state: Tensor, features: Tensor) -> Tensor:
    """Run the cross-attention on [n, H], each row of which sees the features [n, H] up to its own, word by word."""
    layer, eps = draft.layers[1], draft.eps

    def normed(x: Tensor, scale: torch.nn.Module) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], scale.weight, eps)

    attention = layer["self_attn"]
    queries = attention["q_proj"](normed(state, layer["input_layernorm"])).unflatten(-1, (2, 64))
    keys, values = (attention[name](features).unflatten(-1, (1, 64)) for name in ("k_proj", "v_proj"))
    queries, keys = normed(queries, attention["q_norm"]), normed(keys, attention["k_norm"])
    heads = [one.transpose(0, 1)[None] for one in (queries, keys.repeat(1, 2, 1), values.repeat(1, 2, 1))]
    attended = functional.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1).flatten(1)
    on_attention, on_mlp = draft.gates.tanh()
    state = state + on_attention * attention["o_proj"](attended)
    x, mlp = normed(state, layer["post_attention_layernorm"]), layer["mlp"]
    return state + on_mlp * mlp["down_proj"](functional.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))


@torch.inference_mode()
def test_what_it_drafts_is_three_layers_over_the_text_with_its_own_guesses_for_features(tiny_target: Path) -> None:
    draft, (hidden, token_ids) = made(tiny_target), text(9)
    norm = read_tensor(tiny_target, "model.norm.weight").float()
    features = functional.rms_norm(hidden[0, :, -128:], (128,), norm, draft.eps)
    embedding = read_tensor(tiny_target, "model.embed_tokens.weight").float()
    rows = Rows(hidden, token_ids, torch.tensor([0]), torch.tensor([8]))
    for step, drafted in enumerate(draft.unroll(rows, 3)):
        read = embedding[token_ids[0, 1 : 10 + step]]
        state = of_features(draft, library_layer(draft, read, normed=False), features)
        last = library_layer(draft, state, 2)[-1]
        guess = functional.rms_norm(last, (128,), draft.norm.weight, draft.eps)
        torch.testing.assert_close(drafted.hidden[0], guess, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(drafted.logits[0], output_embedding(tiny_target) @ guess, rtol=1e-3, atol=1e-3)
        features = torch.cat([features, guess[None]])


@torch.inference_mode()
def test_features_say_nothing_to_a_new_draft_and_something_to_one_whose_gates_are_open(tiny_target: Path) -> None:
    hidden, token_ids = text(9)
    rows = Rows(hidden, token_ids, torch.tensor([0]), torch.tensor([8]))
    new = dream.create(dream.Params(vocab_size=259), tiny_target, np.ones(259))
    for draft, same in ((new, True), (made(tiny_target), False)):
        (one,), (other,) = draft.unroll(rows, 1), draft.unroll(rows._replace(hidden=hidden.flip(1)), 1)
        assert torch.allclose(one.logits, other.logits, atol=1e-4) == same


@torch.inference_mode()
def test_what_the_target_looks_at_is_what_the_library_says(deep_target: Path) -> None:
    draft = made(deep_target, middle_layers=(1, 2, 3))
    model = AutoModelForCausalLM.from_pretrained(deep_target, dtype=torch.float32, attn_implementation="eager")
    told = model(text(12)[1], output_hidden_states=True, output_attentions=True)
    for number, layer in enumerate(draft.watchers, 1):
        states = told.hidden_states[number][0]
        queries, keys = layer.project(states, torch.arange(len(states)), draft.rotated)
        torch.testing.assert_close(watched.weights(queries, keys), told.attentions[number][0], rtol=1e-3, atol=1e-4)
    # Each token's feature is of the layer that looks at the text with the least entropy.
    entropies = torch.stack([-torch.special.xlogy(one, one).sum(-1).mean(1)[0] for one in told.attentions[1:]])
    wanted = torch.stack(told.hidden_states[1:4])[entropies.argmin(0), 0, torch.arange(states.shape[0])]
    chosen = draft.chosen(torch.cat([*told.hidden_states[1:4], told.hidden_states[4]], dim=-1))[0]
    torch.testing.assert_close(chosen, wanted)
    assert len(set(entropies.argmin(0).tolist())) > 1


def test_training_adds_the_distance_to_the_intermediate_feature(tiny_target: Path) -> None:
    draft, (hidden, token_ids) = made(tiny_target, noise=0.0, middle_weight=3.0), text(9)
    rows = Rows(hidden, token_ids, torch.zeros(2, dtype=torch.int64), torch.tensor([3, 6]))
    (scored,) = draft.unroll(rows, 1)
    (trained,) = draft.unroll(rows._replace(rng=torch.Generator().manual_seed(0)), 1)
    assert scored.added is None
    _, fused = draft.read(draft.start(1), hidden, token_ids[:, :10])
    stream = hidden[0, [4, 7], :128]  # of the only watched layer, of the token that a row knows last
    pairs = [functional.rms_norm(one, (128,), eps=draft.eps) for one in (fused[0, [3, 6]], stream)]
    wanted = 3 * functional.smooth_l1_loss(*pairs, reduction="none").mean(-1)
    torch.testing.assert_close(trained.added, wanted)
    trained.added.sum().backward()
    assert draft.gates.grad.abs().min() > 0


def test_streams_are_spread_over_the_first_two_fifths() -> None:
    assert [dream.default_middle(layers) for layers in (1, 2, 5, 12, 30)] == [
        (0,), (1,), (1, 2), (1, 2, 3, 4), (1, 5, 8, 12),
    ]  # fmt: skip


def test_an_image_is_judged_when_the_token_after_it_has_been_read() -> None:
    flags = [False, True, True, False, True, False, True]
    assert list(ended(flags, 0)) == [(1, 3), (4, 5)]
    assert list(ended(flags, 4)) == [(4, 5)]
    assert list(ended(flags, 6)) == []
    scores = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert left_out(scores, 0.5).tolist() == [2, 0]
    assert left_out(scores, 0.01).tolist() == [3, 2, 0]  # one is kept
    assert left_out(scores, 1.0).tolist() == []


@torch.inference_mode()
def test_what_an_image_leaves_is_seen_by_what_comes_after_it_and_no_more_is_held(tiny_target: Path) -> None:
    """Image tokens stand at 3 to 6; two of them are embedded in rows that later rows neither see nor keep."""
    draft = made(tiny_target, image_tokens=(9, 15))
    hidden, token_ids = text(10)
    token_ids[0, 3:7] = torch.tensor([10, 11, 9, 15])
    memory, _ = draft.read(draft.start(1), hidden, token_ids[:, :11])
    queries, keys = draft.watchers[0].project(hidden[0, :, :128], torch.arange(10), draft.rotated)
    best = watched.looked_at(queries[7], keys[3:7]).topk(2).indices
    dropped = sorted({0, 1, 2, 3} - set(best.tolist()))
    assert memory.gone[0].tolist() == [7 if place - 2 in dropped else NEVER for place in range(10)]
    seen = draft.seen(memory, torch.tensor([0, 0]), torch.tensor([6, 7]))[0]
    assert seen[0].tolist() == [True] * 7 + [False] * 3
    assert (~seen[1]).nonzero()[:, 0].tolist() == sorted([*(2 + place for place in dropped), 8, 9])
    pruned = draft.pruned(memory)
    assert [pair[0].shape[1] for pair in pruned.text] == [8, 10, 8]


@torch.inference_mode()
def test_an_image_is_forgotten_in_training_as_in_the_engine_however_the_text_comes(tiny_target: Path) -> None:
    draft, whole = made(tiny_target, image_tokens=(9, 15)), made(tiny_target)
    hidden, token_ids = text(12)
    token_ids[0, 2:8] = torch.tensor([10, 11, 9, 15, 12, 13])
    rows = Rows(hidden, token_ids, torch.tensor([0]), torch.tensor([11]))
    wanted = draft.unroll(rows, 1)[0].logits[0]
    assert not torch.allclose(wanted, whole.unroll(rows, 1)[0].logits[0], atol=1e-2)
    for bites in ([12], [3, 9], [7, 1, 1, 3], [8, 4]):
        drafter, start, seen = draft.drafter(40), 0, []
        for size in bites:
            drafter.extend(token_ids[0, start : start + size + 1], hidden[0, start : start + size])
            start += size
        drafter.propose(1, lambda logits, seen=seen: (seen.append(logits), (3, None))[1])
        torch.testing.assert_close(seen[0], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_training_teaches_a_draft_of_chance_what_is_planted_in_texts_with_images(tmp_path: Path) -> None:
    """Of the target's tokens the last third are an image's; the draft forgets half of them and changes no output."""
    planted.build(tmp_path)
    params = dream.Params(vocab_size=70, image_tokens=(45, 65))
    draft = dream.create(params, tmp_path, np.ones(259))
    shake(draft, 0.5, 0)
    samples = planted.answers(tmp_path, 40, 1.0, seed=0) + planted.answers(tmp_path, 24, 0.0, seed=2)
    held_out = planted.answers(tmp_path, 8, 0.0, seed=1)
    before = tau_of(draft, tmp_path, held_out, 4, tmp_path / "before")
    settings = distill.Params(num_epochs=12, batch_tokens=512, learning_rate=4e-3, num_threads=1)
    distill.train(draft, tmp_path, samples, settings, 4, tmp_path / "work")
    after = tau_of(draft, tmp_path, held_out, 4, tmp_path / "after")
    assert before < 1.2 < 2.0 < after, (before, after)
    assert draft.gates.abs().min() > 0
    asked = [sample.prompt_ids for sample in held_out]
    for tree in ("chain", "dynamic"):
        answers = answer_all(tmp_path, draft, asked, num_draft_tokens=6, trees={"name": tree})
        require_equal(answers, answer_all(tmp_path, None, asked))
        assert sum(len(answer.drafted) for answer in answers) < 23 * len(answers) / 1.5


def test_layers_image_tokens_and_states_that_do_not_fit_are_refused(tiny_target: Path, tmp_path: Path) -> None:
    for layers in ((2,), (1, 1), ()):
        with pytest.raises(ValueError, match="middle_layers must be"):
            dream.create(dream.Params(vocab_size=64, middle_layers=layers), tiny_target, np.ones(259))
    for tokens in ((5, 259), (6, 5)):
        with pytest.raises(ValueError, match="image_tokens must be the first and the last of 0 to 258"):
            dream.create(dream.Params(vocab_size=64, image_tokens=tokens), tiny_target, np.ones(259))
    require_refused(dream, tiny_target, tmp_path, "image_tokens must be", image_tokens="all")
