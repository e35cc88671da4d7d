"""Language models as drafts, of which smaller ones may be nested in one: one pass and one training for all."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models import catalog, quantize
from models.core.checkpoints.loading import read_tensor, read_tensors
from models.core.drafting.draft_families import open_draft
from models.core.learning import distill
from models.core.learning.hidden import Sample, hidden_states, pack
from models.drafts import lm
from models.targets import describe, random
from tests.models import planted
from tests.models.drafts.answered import answers_of, prompts, tau_of

NESTED = (1, 2)
SETTINGS = {"batch_tokens": 128, "num_threads": 1}


@pytest.mark.slow
def test_the_library_loads_what_is_saved(deep_target: Path, tmp_path: Path) -> None:
    draft = lm.create(lm.Params(num_layers=2), deep_target, None)
    lm.save(draft, tmp_path)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    token_ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        mine = draft.lm_head(draft.model(token_ids).last_hidden_state)
        assert torch.allclose(loaded(token_ids).logits, mine, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["int8_dynamic", "rtn"])
def test_a_quantized_target_gives_the_weights_that_it_serves(deep_target: Path, tmp_path: Path, method: str) -> None:
    quantized_dir = tmp_path / "quantized"
    shutil.copytree(deep_target, quantized_dir, ignore=shutil.ignore_patterns("config.json", "*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(deep_target, dtype=torch.float32)
    module = catalog.load("quantize", method)
    quantize.save(module.quantize(model, [], module.Params()), quantized_dir)
    draft = lm.create(lm.Params(num_layers=3), quantized_dir, None)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(draft.state_dict()[name], read_tensor(quantized_dir, name))
    assert not torch.equal(draft.state_dict()[name], read_tensor(deep_target, name).float())
    # A draft with most of the target's layers is accepted by it, whose states come from its quantized weights.
    assert tau_of(draft, quantized_dir, answers_of(deep_target, prompts(4)), 3, tmp_path / "states") > 1
    (tmp_path / "draft").mkdir()
    lm.save(draft, tmp_path / "draft")
    lm.check(tmp_path / "draft", None, describe(quantized_dir))


@pytest.mark.parametrize("num_layers", [0, 4, 5])
def test_a_draft_must_be_smaller_than_its_target(deep_target: Path, num_layers: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 3, less than the target's; got {num_layers}"):
        lm.create(lm.Params(num_layers=num_layers), deep_target, None)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 67, (6, 20), generator=rng).tolist()
    return [Sample(str(number), "d", one[: 4 + number % 3], one[4 + number % 3 :]) for number, one in enumerate(ids)]


def make(deep_target: Path, nested: tuple[int, ...] = NESTED) -> lm.Lm:
    return lm.create(lm.Params(num_layers=3, nested=nested), deep_target, None)


def loss_of(draft: lm.Lm, deep_target: Path, samples: list[Sample], work: Path) -> float:
    states = hidden_states(draft, deep_target, samples, work)
    loop = distill._Loop(draft, deep_target, states, distill.Params(**SETTINGS), 2, work, 0, (), (), lambda _: None)
    loop.states = states
    num_rows = sum(len(sample.completion_ids) - 1 for sample in samples)
    return float(loop._loss(samples, 0.0, num_rows)[0].detach())


def test_one_pass_says_what_each_nested_draft_says_by_itself(deep_target, samples, tmp_path) -> None:
    draft = make(deep_target)
    rows, *_ = pack(samples, hidden_states(draft, deep_target, samples, tmp_path), 1, draft)
    with torch.inference_mode():
        said = [unrolls[0].logits for unrolls in draft.unroll_all(rows, 1)]
        alone = [one.unroll(rows, 1)[0].logits for one in (draft, *(lm.cut(draft, number) for number in NESTED))]
    assert [len(lm.cut(draft, number).model.layers) for number in NESTED] == [1, 2]
    assert not torch.equal(said[1], said[2])
    for together, apart in zip(said, alone, strict=True):
        torch.testing.assert_close(together, apart)


def test_the_loss_is_the_mean_of_what_each_would_have_alone(deep_target, samples, tmp_path) -> None:
    draft, apart = make(deep_target), []
    for number in NESTED:
        alone = lm.cut(draft, number)
        alone.config.redraft = {**alone.config.redraft, lm.NESTED: []}  # of two layers, the first one is nested in it
        apart.append(loss_of(alone, deep_target, samples, tmp_path / str(number)))
    plain = loss_of(make(deep_target, nested=()), deep_target, samples, tmp_path / "plain")
    assert loss_of(draft, deep_target, samples, tmp_path / "all") == pytest.approx((plain + sum(apart)) / 3, rel=1e-5)


@pytest.mark.slow
def test_all_learn_at_once_and_leave_the_embedding(deep_target: Path, tmp_path: Path) -> None:
    learnt = planted.answers(deep_target, 24, 0.0, seed=0)
    draft = make(deep_target)

    def taus() -> list[float]:
        drafts = (draft, *(lm.cut(draft, number) for number in NESTED))
        return [tau_of(one, deep_target, learnt, 3, tmp_path) for one in drafts]

    before, embedding = taus(), draft.lm_head.weight.clone()
    params = distill.Params(num_epochs=12, learning_rate=2e-3, **SETTINGS)
    distill.train(draft, deep_target, learnt, params, 3, tmp_path)
    after = taus()
    assert torch.equal(draft.lm_head.weight, embedding)
    assert all(late > early + 0.15 for early, late in zip(before, after, strict=True)), (before, after)


def test_a_nested_draft_survives_its_directory_and_one_cut_out_is_made_for_whom_adopts_it(
    deep_target: Path, tmp_path: Path
) -> None:
    whole, alone, other = tmp_path / "whole", tmp_path / "alone", tmp_path / "other"
    for directory in (whole, alone):
        directory.mkdir()
    lm.save(make(deep_target), whole)
    draft = open_draft(whole, deep_target)
    assert isinstance(draft, lm.Lm)
    assert draft.nested == NESTED
    lm.save(lm.cut(draft, 2), alone)
    assert lm.load(alone, deep_target).nested == (1,)
    tensors = read_tensors(whole)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_tensors(alone).items())
    random.build(random.Params(num_layers=5, seed=9), other)
    with pytest.raises(ValueError, match="was made for target_sha256"):
        lm.check(alone, None, describe(other))
    lm.save(lm.adopt(alone, other), alone)
    lm.check(alone, None, describe(other))


@pytest.mark.parametrize("nested", [(0, 1), (1, 3), (1, 1)])
def test_what_can_not_be_nested_is_refused(deep_target: Path, nested: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nested must ascend within 1 to 2, less than num_layers; got \["):
        make(deep_target, nested)
    lm.save(make(deep_target), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["redraft"]["nested"] = nested
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="nested must ascend within 1 to 2"):
        lm.check(tmp_path, None, describe(deep_target))


def test_layers_that_were_not_trained_as_a_draft_are_not_cut_out(deep_target: Path) -> None:
    with pytest.raises(ValueError, match="first 2 layers of this draft were not trained as one; .* are: 1$"):
        lm.cut(make(deep_target, (1,)), 2)
    with pytest.raises(ValueError, match="nested in it are: none"):
        lm.cut(make(deep_target, ()), 1)


def test_a_model_of_other_tokens_is_not_adopted(deep_target: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    random.build(random.Params(num_layers=1, num_heads=1, seed=3), small)
    adopted = lm.adopt(small, deep_target)
    assert (len(adopted.model.layers), adopted.config.hidden_size) == (1, 64)
    other = shutil.copytree(small, tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["!"], words["#"] = words["#"], words["!"]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="tokenizer is not the target's: 2 tokens differ, such as '!'"):
        lm.adopt(other, deep_target)
    (other / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="has no tokenizer.json, so its vocabulary can't be compared"):
        lm.adopt(other, deep_target)
    for changes, message in (
        ({"vocab_size": 7}, "the draft has vocab_size 7, the target has 259"),
        ({"architectures": ["GPT2LMHeadModel"]}, r"lm takes models of LlamaForCausalLM, .*got \['GPT2LMHeadModel'\]"),
    ):
        config = json.loads((small / "config.json").read_text())
        (other / "config.json").write_text(json.dumps({**config, **changes}))
        with pytest.raises(ValueError, match=message):
            lm.adopt(other, deep_target)
    shutil.copy(small / "config.json", other)
    shutil.copy(small / "tokenizer.json", other)
    (other / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="there is no safetensors file"):
        lm.adopt(other, deep_target)
