import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from models.core.drafting.drafters import QueryingDrafter
from models.core.drafting.proposal import Proposal
from models.core.layers.decoder import Cache, Decoder
from models.core.learning import distill
from models.core.learning.hidden import Sample
from models.drafts import Rows, prompt_tokens
from models.targets import describe, random
from tests.models.drafts.answered import answer_all, answers_of, tau_of
from tests.models.drafts.tiny import change_config, make_tiny, save_tiny

FIRST, NUM, K, HEADS = 3, 31, 3, 4
LIKELIEST = 12.0


def build(directory: Path) -> None:
    """Write a target whose heads say K places ahead what it will say, behind vectors that say nothing themselves.

    After token v comes 3 v modulo 31. Each embedding is a vector of its token and one that all have, by which head j
    finds the row that is j before (a peak of RoPE's), and adds the vector of what comes j places after its token.
    In a text this is the row's own token; behind it, at the k-th vector, it is the one that comes there.
    """
    random.build(random.Params(), directory)
    config = LlamaConfig.from_pretrained(directory)
    config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads = 1, HEADS, HEADS
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    layer, common = model.model.layers[0], NUM
    embedding, output, added = torch.zeros(259, 128), torch.zeros(259, 128), torch.zeros(128, HEADS * 64)
    embedding[:, common] = 1.0
    query, key, value = (torch.zeros(HEADS * 64, 128) for _ in range(3))
    angles = model.model.rotary_emb.inv_freq
    for head in range(HEADS):
        ahead, rows = head + 1, slice(64 * head, 64 * head + 64)
        query[rows, common] = torch.cat([(ahead * angles).cos(), -(ahead * angles).sin()])
        key[rows, common] = torch.cat([torch.ones(32), torch.zeros(32)])
        for token in range(NUM):
            value[64 * head + token, token] = 1.0
            added[(3**ahead * token) % NUM, 64 * head + token] = 0.02
    for token in range(NUM):
        embedding[FIRST + token, token] = 1.0
        output[FIRST + (3 * token) % NUM, token] = LIKELIEST
    values = {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": added}
    with torch.no_grad():
        for name, weight in values.items():
            getattr(layer.self_attn, name).weight.copy_(weight)
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(output)
    model.to(torch.bfloat16).save_pretrained(directory)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("planted")
    build(directory)
    return directory


def asked(seed: int, count: int) -> list[list[int]]:
    starts = np.random.default_rng(seed).integers(1, NUM, size=count).tolist()
    return [[FIRST + start * 3**place % NUM for place in range(5)] for start in starts]


def new(target: Path, **params: object) -> prompt_tokens.PromptTokens:
    return prompt_tokens.create(prompt_tokens.Params(**params), target, np.r_[0, 0, 0, np.arange(256, 0, -1)])


@pytest.fixture(scope="module")
def held_out(target: Path) -> list[Sample]:
    return answers_of(target, asked(1, 6))


@pytest.fixture(scope="module")
def trained(target: Path, tmp_path_factory: pytest.TempPathFactory) -> prompt_tokens.PromptTokens:
    draft = new(target)
    params = distill.Params(num_epochs=40, batch_tokens=256, learning_rate=0.03, num_threads=1)
    learnt = answers_of(target, asked(0, 6))
    distill.train(draft, target, learnt, params, K, tmp_path_factory.mktemp("work"))
    return draft


def test_training_finds_such_vectors(target, held_out, trained, tmp_path) -> None:
    before, after = (tau_of(one, target, held_out, K, tmp_path) for one in (new(target), trained))
    assert before < 1.5 < 3.5 < after, (before, after)


@pytest.mark.parametrize("tree", ["chain", "sequoia"])
def test_a_trained_draft_saves_steps_changes_no_token_and_makes_one_pass_of_its_own(
    target: Path, trained: prompt_tokens.PromptTokens, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = answer_all(target, None, asked(2, 3))
    passes: list[int] = []
    forward = Decoder.forward

    def counted(self: Decoder, token_ids: torch.Tensor, *rest: object, **more: object) -> object:
        passes.append(len(token_ids))
        return forward(self, token_ids, *rest, **more)

    monkeypatch.setattr(Decoder, "forward", counted)
    answers = answer_all(target, trained, asked(2, 3), num_draft_tokens=K, trees={"name": tree})
    assert [one.token_ids for one in answers] == [one.token_ids for one in plain]
    steps = sum(len(one.drafted) for one in answers)
    assert steps < 23 * len(answers) / 2
    assert passes.count(0) == len(answers)  # that read no token: behind each prompt
    assert len(passes) == steps + 2 * len(answers)


def test_what_is_heard_behind_a_row_is_what_a_pass_of_its_own_would_have_read(tiny_target: Path) -> None:
    draft, target = make_tiny(prompt_tokens, tiny_target), Decoder.load(tiny_target, torch.float32)
    assert isinstance(draft, prompt_tokens.PromptTokens)
    text, proposal = [5, 6, 7, 8], Proposal(torch.tensor([[20, 21, 22, 23]]), (-1, -1, 0, 2))
    for row, path in enumerate(([], [20], [21], [20, 22], [20, 22, 23])):
        cache = Cache(target, 60)
        drafter, alone = draft.drafter(60), draft.drafter(60)
        assert isinstance(drafter, QueryingDrafter)
        drafter.share(target, cache)
        with torch.inference_mode():
            target.forward(torch.tensor(text[:-1]), cache)
            drafter.extend(torch.tensor(text), torch.empty(3, 0))
            vectors, parents = drafter.ask(proposal)
            tokens = torch.tensor([text[-1], *proposal.token_ids[0].tolist()])
            heard, _ = target.forward(tokens, cache, (), (*proposal.row_parents, *parents), vectors=vectors)
            cache.length = 3
            drafter.extend(torch.tensor([text[-1], *path, 9]), torch.empty(len(path) + 1, 0))
            drafter.hear(heard[5:], row)
            alone.extend(torch.tensor([*text, *path, 9]), torch.empty(len(text) + len(path), 0))
            found, wanted = (one.expand([30, 31], [-1, 0], [-1, 0]) for one in (drafter, alone))
        known = found[:, 0] > -math.inf  # as deep as there were vectors
        assert known[0]
        torch.testing.assert_close(found[known], wanted[known], rtol=1e-3, atol=1e-3)


def test_vectors_are_read_where_they_are_likely_to_be_used(target: Path) -> None:
    """Chances of being the last are 0.4, 0.5 and 0.1, of i right guesses 0.8, 0.6, 0.3: 0.24, 0.12; 0.3, 0.15; …"""
    draft = new(target, num_vectors=6)
    assert draft.allot([0.4, 0.5, 0.1], [0.8, 0.6, 0.3]) == [2, 3, 1]
    assert new(target, num_vectors=7).allot([0.4, 0.5, 0.1], [0.8, 0.6, 0.3]) == [3, 3, 1]
    assert new(target, num_vectors=1).allot([0.4, 0.5, 0.1], [0.8, 0.6, 0.3]) == [1, 1, 1]
    assert new(target, num_vectors=99).allot([0.4, 0.5, 0.1], [0.8, 0.6, 0.3]) == [3, 3, 3]
    assert [draft.num_vectors(number) for number in (0, 1, 2, 5, 9)] == [0, 6, 6, 6, 10]
    assert new(target, num_vectors=9, ensemble=2).num_vectors(2) == 8


def test_in_training_a_share_of_the_places_is_read_and_all_of_them_otherwise(target: Path) -> None:
    draft = new(target, share=0.25)
    index = torch.arange(4, 24)
    rows = Rows(torch.empty(1, 25, 0), torch.full((1, 30), 5), torch.zeros_like(index), index)
    assert [len(one.running) for one in draft.unroll(rows, 2)] == [20, 20]
    drawn = draft.unroll(rows._replace(rng=torch.Generator().manual_seed(0)), 9)
    assert [len(one.running) for one in drawn] == [5, 5, 5]
    assert len(set(drawn[0].running.tolist())) == 5


def test_new_vectors_are_the_commonest_tokens_and_begin_again_where_these_end(tiny_target: Path) -> None:
    counts = np.zeros(259)
    counts[[40, 7]] = 3, 9
    draft = prompt_tokens.create(prompt_tokens.Params(num_prompts=2), tiny_target, counts)
    embedding = Decoder.load(tiny_target, torch.float32)._embedding
    assert torch.equal(draft.vectors[0].detach(), embedding[[7, 40]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": None}, 'has "prompt_tokens" None; wanted its settings'),
        ({"prompt_tokens": {"num_promts": 4}}, "num_promts"),
        ({"prompt_tokens": {"num_prompts": 0}}, "num_prompts"),
        ({"prompt_tokens": {"num_prompts": 3}}, "differs from the served draft in prompt_tokens"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tiny_target, tmp_path, change, message) -> None:
    saved, other = (tmp_path / name for name in ("saved", "other"))
    change_config(save_tiny(prompt_tokens, tiny_target, saved), other, **change)
    with pytest.raises(ValueError, match=message):
        prompt_tokens.check(other, saved, describe(tiny_target))
