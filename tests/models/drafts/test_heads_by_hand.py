"""Heads by hand that read the target's last states: `medusa`, `hydra`, `clover`, `chimera` and `eagle`."""

from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from models import catalog
from models.core.checkpoints.loading import read_tensor
from models.core.checkpoints.readout import output_embedding
from models.drafts import Rows, chimera, clover, eagle, hydra, medusa
from tests.models.drafts.tiny import library_layer, make_tiny, params_of, rows_at, save_tiny

make = partial(make_tiny, scale=0.1)  # every part says something


def test_a_medusa_head_by_hand() -> None:
    """h = [3, 4] / √12.5 = [0.8485, 1.1314], W₁ = [[1, 0], [0, 0]], b = [0, 1]; SiLU(x) = x / (1 + e⁻ˣ)."""
    config = {"hidden_size": 2, "vocab_size": 3, "truncated_vocab_size": 3, "num_heads": 1, "num_hidden_layers": 1}
    draft = medusa.Medusa(config)
    with torch.no_grad():
        draft.blocks[0].layers[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        draft.blocks[0].layers[0].bias.copy_(torch.tensor([0.0, 1.0]))
        draft.lm_heads[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        hidden, logits = draft.say(0, draft.normed(torch.tensor([[3.0, 4.0]])), torch.tensor([[1]]))
    first = 0.848528 + 0.848528 / (1 + np.exp(-0.848528))
    second = 1.131371 + 1 / (1 + np.exp(-1.0))
    torch.testing.assert_close(hidden, torch.tensor([[first, second]], dtype=torch.float32))
    torch.testing.assert_close(logits, torch.tensor([[first, second, first + second]], dtype=torch.float32))


@pytest.mark.parametrize("family", [hydra, medusa])
def test_new_heads_say_what_the_target_said_at_their_state(tiny_target: Path, family: ModuleType) -> None:
    draft = family.create(params_of(family), tiny_target, np.arange(259))
    state = draft.normed(torch.randn(3, 128, generator=torch.Generator().manual_seed(0)))
    wanted = state @ output_embedding(tiny_target)[195:].T
    for head in range(4):
        torch.testing.assert_close(draft.say(head, state, torch.zeros(3, head + 1, dtype=torch.int64))[1], wanted)


def test_siblings_have_equal_children_because_no_head_reads_what_was_drafted(tiny_target: Path) -> None:
    drafter = medusa.create(params_of(medusa), tiny_target, np.arange(259)).drafter(20)
    drafter.extend(torch.arange(3, 8), torch.randn(4, 128))
    one, other = drafter.expand([200, 201], [-1, -1], [0, 1])
    assert torch.equal(one, other)


def test_vllm_serves_as_many_heads_as_tokens_are_drafted_of_the_whole_vocabulary(tiny_target, tmp_path) -> None:
    vllm = catalog.load("engines", "vllm")

    def require(params: medusa.Params, k: int, **ways: object) -> None:
        vllm.require_draft(params, vllm.Params(num_draft_tokens=k, **ways))

    require(medusa.Params(vocab_size=0), 4)
    with pytest.raises(ValueError, match=r"got 4 heads for 3 tokens: set num_heads = 3 in \[draft\]"):
        require(medusa.Params(vocab_size=0), 3)
    with pytest.raises(ValueError, match=r"say every token of the target's vocabulary, this one 4096: set vocab_size"):
        require(medusa.Params(), 4)
    for ways in ({"lookup": {"num_tokens": 4}}, {"lengths": {"name": "fixed"}}, {"draft_sample_method": "greedy"}):
        with pytest.raises(ValueError, match=f'key "{next(iter(ways))}" would do nothing, since vLLM drafts the same'):
            require(medusa.Params(vocab_size=0), 4, **ways)
    whole, part = (save_tiny(medusa, tiny_target, tmp_path / str(served), served=served) for served in (True, False))
    assert medusa.vllm_config(whole)["num_speculative_tokens"] == 3
    with pytest.raises(ValueError, match="say every token of the target's 259, this one 64"):
        medusa.vllm_config(part)


def test_a_hydra_head_reads_the_state_and_then_the_tokens_in_their_order(tiny_target: Path) -> None:
    draft = make_tiny(hydra, tiny_target)
    embedding = read_tensor(tiny_target, "model.embed_tokens.weight").float()
    state = torch.arange(128.0)[None]
    read = draft.inputs(1, state, torch.tensor([[7, 5]]))
    assert torch.equal(read[0], torch.cat([state[0], embedding[7], embedding[5]]))
    assert [layer.layers[0].in_features for layer in draft.blocks] == [256, 384, 512, 640]


@pytest.mark.parametrize("family", [clover, hydra])
def test_what_a_head_says_hangs_on_the_tokens_before_and_on_no_later_one(tiny_target: Path, family: ModuleType) -> None:
    draft = make(family, tiny_target)
    rows = rows_at(1)
    tokens = rows.token_ids.clone()
    tokens[0, 4] = (tokens[0, 4] + 1) % 259
    one, two = draft.unroll(rows, 4), draft.unroll(rows._replace(token_ids=tokens), 4)
    # Row 1 goes on from tokens 1 and 2: steps read 2; then 3; then the changed one, and one after it.
    assert [torch.equal(a.logits, b.logits) for a, b in zip(one, two, strict=True)] == [True, True, False, False]


def test_clovers_attention_decoder_by_hand() -> None:
    """Two heads of width 1, whose cosines are the signs of the products; h = [3, −4] / √12.5 after the norm."""
    decoder = clover.AttentionDecoder(2, 2, 1e-5)
    decoder.add_nothing()
    state, embedded = torch.tensor([3.0, -4.0]), torch.tensor([0.5, 2.0])
    assert torch.equal(decoder(state, embedded), state)
    with torch.no_grad():
        decoder.v.weight.copy_(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
        decoder.v.bias.copy_(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(decoder(state, embedded), torch.tensor([3 + 2.5, -4 - 3.0]))
    one = clover.AttentionDecoder(2, 1, 1e-5)
    one.add_nothing()
    with torch.no_grad():
        one.v.weight.copy_(torch.eye(2))
    weight = (3 * 0.5 - 4 * 2) / (5 * (0.25 + 4) ** 0.5)
    torch.testing.assert_close(one(state, embedded), state + weight * embedded, rtol=1e-4, atol=1e-4)


def test_a_new_clover_says_what_the_target_would_with_its_last_layer_once_more(tiny_target: Path) -> None:
    draft = clover.create(params_of(clover), tiny_target, np.arange(259))
    last = f"model.layers.{draft.num_target_layers - 1}.self_attn.v_proj.weight"
    assert torch.equal(draft.layer["self_attn"]["v_proj"].weight, read_tensor(tiny_target, last).float())
    rows = rows_at(4, 8)
    with torch.inference_mode():
        made = library_layer(draft, rows.hidden[0])
        normed = functional.rms_norm(made, (128,), draft.target_norm, draft.eps)
        wanted = (normed @ output_embedding(tiny_target)[195:].T)[[4, 8]]
        drafted = draft.unroll(rows, 3)
    for one in drafted:
        torch.testing.assert_close(one.logits, wanted, rtol=1e-3, atol=1e-3)


def test_clovers_later_steps_are_the_recurrence_of_the_paper(tiny_target: Path) -> None:
    draft = make(clover, tiny_target)
    hidden, tokens = torch.randn(1, 9, 128), torch.arange(3, 23)[None]
    embedding = output_embedding(tiny_target)
    with torch.inference_mode():
        drafted = draft.unroll(Rows(hidden, tokens, torch.tensor([0]), torch.tensor([6])), 3)
        mixed, keys, values = draft.context(hidden, tokens[:, 1:10])
        rest = (torch.tensor([0]), torch.tensor([6]), keys, values, [])
        told = draft.advance(0, mixed[:, 6], tokens[:, 7], *rest)[:, :128]
        for step in (1, 2):
            read = embedding[tokens[0, 7 + step]][None]
            told = draft.regressive(told, read)
            said = torch.cat([told, read], dim=-1) @ draft.later.weight.T + draft.later.bias
            normed = functional.rms_norm(said, (128,), draft.norm.weight, draft.eps)
            torch.testing.assert_close(drafted[step].hidden, normed, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(drafted[step].logits, normed @ embedding[3:67].T, rtol=1e-3, atol=1e-3)


def test_heads_that_can_not_be_are_refused(tiny_target: Path) -> None:
    config = make(clover, tiny_target).config
    with pytest.raises(ValueError, match="clover's 3 attention heads share a width that they divide; got 128"):
        clover.Clover({**config, "num_attention_heads": 3})


def test_a_trigram_is_the_newest_token_and_the_two_before_and_shorter_where_a_text_begins(tiny_target: Path) -> None:
    """With layer and products silenced, what is said is U [a E(t+1) + b E(t) + c E(t−1); f(t)]."""
    draft, rows = make(chimera, tiny_target), rows_at(0, 1, 5)
    with torch.no_grad():
        draft.trigram.pass_through()
        weights = torch.tensor([2.0, 3.0, 5.0])
        draft.trigram.residual.weight.copy_(torch.cat([weight * torch.eye(128) for weight in weights], dim=-1))
        draft.layer["self_attn"]["o_proj"].weight.zero_()
        draft.layer["mlp"]["down_proj"].weight.zero_()
        embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[0]]
        features = draft.combine(rows.hidden)[0]
        drafted = draft.unroll(rows, 3)
        for step, one in enumerate(drafted):
            for row, index in enumerate((0, 1, 5)):
                newest = index + 1 + step
                parts = [weights[back] * embedded[newest - back] for back in range(3) if newest >= back]
                wanted = torch.stack(parts).sum(0)
                torch.testing.assert_close(one.hidden[row], wanted, rtol=1e-4, atol=1e-4)
                said = draft.heads[step].weight @ torch.cat([wanted, features[index]])
                torch.testing.assert_close(one.logits[row], said, rtol=1e-4, atol=1e-4)


def test_chimeras_step_is_the_librarys_layer_over_features_then_guesses_then_one_trigram(tiny_target: Path) -> None:
    draft, rows = make(chimera, tiny_target), rows_at(6)
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[0]]
    with torch.inference_mode():
        drafted, read = draft.unroll(rows, 3), draft.combine(rows.hidden)[:, :7]
        for step in range(3):
            asked = draft.trigram(embedded[5 + step : 8 + step].flip(0).flatten()[None])
            read = torch.cat([read, asked[None]], dim=1)
            made = library_layer(draft, read[0])[None, -1:]
            torch.testing.assert_close(drafted[step].hidden, made[0], rtol=1e-4, atol=1e-4)
            read = torch.cat([read[:, :-1], made], dim=1)


def test_a_new_chimera_says_with_the_targets_output_matrix_what_its_layer_makes(tiny_target: Path) -> None:
    counts = np.zeros(259)
    counts[3:67] = 1
    draft = chimera.create(params_of(chimera), tiny_target, counts)
    for one in draft.unroll(rows_at(4, 8), 3):
        torch.testing.assert_close(one.logits, one.hidden @ output_embedding(tiny_target)[3:67].T)
    last = f"model.layers.{draft.num_target_layers - 1}.self_attn.v_proj.weight"
    assert torch.equal(draft.layer["self_attn"]["v_proj"].weight, read_tensor(tiny_target, last).float())


def test_a_feature_is_what_the_targets_output_matrix_reads(tiny_target: Path) -> None:
    draft = eagle.create(eagle.Params(vocab_size=259), tiny_target, np.ones(259))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    kept: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: kept.append(output))
    with torch.inference_mode():
        wanted = model(torch.arange(3, 20)[None]).logits
        _, said = draft.say(draft.combine(kept[0]))
    torch.testing.assert_close(said, wanted, rtol=1e-4, atol=1e-4)


def test_eagles_first_step_is_the_librarys_layer_without_its_first_norm(tiny_target: Path) -> None:
    draft = make_tiny(eagle, tiny_target)
    rows = rows_at(4, 8)
    embedded = read_tensor(tiny_target, "model.embed_tokens.weight").float()[rows.token_ids[:, 1:10]]
    with torch.inference_mode():
        read = torch.cat([embedded, draft.combine(rows.hidden)], dim=-1) @ draft.fc.weight.T
        (drafted,) = draft.unroll(rows, 1)
        wanted = library_layer(draft, read[0], normed=False)[[4, 8]]
    torch.testing.assert_close(drafted.hidden, wanted, rtol=1e-4, atol=1e-4)


def test_eagles_training_reads_features_that_are_off_by_no_more_than_the_noise(tiny_target: Path) -> None:
    draft = eagle.create(eagle.Params(noise=0.25, vocab_size=64), tiny_target, np.ones(259))
    hidden, tokens = torch.randn(1, 300, 128), torch.full((1, 300), 5)
    with torch.inference_mode():
        plain, noisy, again = (
            draft.context(hidden, tokens, rng=rng)[0]
            for rng in (None, torch.Generator().manual_seed(1), torch.Generator().manual_seed(1))
        )
    assert torch.equal(noisy, again)
    assert 0.24 < float((noisy - plain).abs().max()) <= 0.25 + 1e-5
    assert float((noisy - plain).mean()) == pytest.approx(0, abs=0.005)


def test_of_eagle_what_vllm_serves_says_every_token_of_the_target(tiny_target: Path, tmp_path: Path) -> None:
    whole, part = (save_tiny(eagle, tiny_target, tmp_path / str(served), served=served) for served in (True, False))
    assert eagle.load(whole, tiny_target).vocabulary.tolist() == list(range(259))
    assert eagle.vllm_config(whole) == {"method": "eagle", "model": str(whole)}
    with pytest.raises(ValueError, match="every token of the target's 259, this one 64: set vocab_size = 0 in"):
        eagle.vllm_config(part)
