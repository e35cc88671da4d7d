import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from models.core.learning import distill
from models.core.learning.hidden import Sample, hidden_states, pack
from models.core.learning.teacher import TeacherParams, Teachers, require_reader, require_teachers
from models.drafts import Unrolled, eagle3
from models.losses import cross_entropy, forward_kl
from models.targets import random
from tests.models.core.learning.runs import require_equal, short

K = 3


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model with the target's tokenizer, deeper and wider."""
    directory = tmp_path_factory.mktemp("other")
    random.build(random.Params(num_layers=3, num_heads=3, seed=1), directory)
    return directory


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 67, (8, 20), generator=rng).tolist()
    return [Sample(str(number), "d", one[: 4 + number % 3], one[4 + number % 3 :]) for number, one in enumerate(ids)]


def head(target: Path) -> eagle3.Eagle3:
    counts = np.zeros(259)
    counts[3:67] = 1
    return eagle3.create(eagle3.Params(vocab_size=64), target, counts)


def beside(*weights: float) -> tuple[TeacherParams, ...]:
    return tuple(TeacherParams(model={"name": "random", "seed": 1}, weight=weight) for weight in weights)


def law(model: Path, sample: Sample, draft: eagle3.Eagle3) -> torch.Tensor:
    """Return [T, D] what a model says after each token, as transformers computes it."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        return loaded(torch.tensor([sample.token_ids])).logits[0].softmax(-1)[:, draft.vocabulary]


def test_labels_are_the_weighted_mean_of_all_laws(
    tiny_target: Path, other: Path, samples: list[Sample], tmp_path: Path
) -> None:
    draft, batch = head(tiny_target), samples[:3]
    teachers = Teachers(draft, tiny_target, forward_kl.Params(), beside(3.0), [other])
    states = hidden_states(draft, tiny_target, samples, tmp_path)
    teachers.read(states, "cpu")
    rows, final, log_sums, _ = pack(batch, states, 1, draft)
    places = rows.sequence, rows.index + 1
    unrolled = Unrolled(torch.arange(len(rows.index)), torch.zeros(len(rows.index), 64))
    word = teachers.say(batch, (final, log_sums))
    said = teachers.drafted(unrolled, rows.token_ids[places], word, places).target_probs
    by_hand = torch.cat(
        [((law(tiny_target, one, draft) + 3 * law(other, one, draft)) / 4)[len(one.prompt_ids) : -1] for one in batch]
    )
    torch.testing.assert_close(said, by_hand, rtol=0.1, atol=2e-3)  # states are kept in bfloat16


def trained(target: Path, samples: list[Sample], work: Path, dirs: list[Path], **changes: object) -> eagle3.Eagle3:
    draft = head(target)
    params = short(**{"num_epochs": 2, "batch_tokens": 128, "learning_rate": 3e-3, **changes})
    distill.train(draft, target, samples, params, K, work, teacher_dirs=dirs)
    return draft


def test_a_teacher_of_weight_0_changes_nothing(
    tiny_target: Path, other: Path, samples: list[Sample], tmp_path: Path
) -> None:
    plain = trained(tiny_target, samples, tmp_path / "plain", [])
    mute = trained(tiny_target, samples, tmp_path / "mute", [other], teachers=beside(0.0))
    heard = trained(tiny_target, samples, tmp_path / "heard", [other], teachers=beside(1.0))
    require_equal(plain, mute)
    assert not torch.equal(plain.fc.weight, heard.fc.weight)


@pytest.mark.slow
def test_a_draft_that_writes_its_answers_follows_a_heavy_teacher(
    tiny_target: Path, other: Path, samples: list[Sample], tmp_path: Path
) -> None:
    far, settings = {}, {"num_epochs": 12, "learning_rate": 1e-2, "follow": "all", "answers": {"name": "on_policy"}}
    for name, weight in (("plain", 0.0), ("taught", 20.0)):
        draft = trained(tiny_target, samples, tmp_path / name, [other], teachers=beside(weight), **settings)
        states = hidden_states(draft, tiny_target, samples, tmp_path / "states")
        with torch.inference_mode():
            rows, *_ = pack(samples, states, 1, draft)
            q = draft.unroll(rows, 1)[0].logits.softmax(-1)
        p = torch.cat([law(other, one, draft)[len(one.prompt_ids) : -1] for one in samples])
        far[name] = float((q - p / p.sum(-1, keepdim=True)).abs().sum(-1).mean())
    assert far["taught"] < 0.9 * far["plain"], far


def changed(directory: Path, made: Path, file: str, **changes: object) -> Path:
    shutil.copytree(directory, made)
    content = json.loads((made / file).read_text())
    (made / file).write_text(json.dumps({**content, **changes}))
    return made


def test_what_can_not_teach_is_refused(tiny_target: Path, other: Path, tmp_path: Path) -> None:
    draft, one = head(tiny_target), beside(1.0)
    require_teachers(draft, tiny_target, one, [other])
    with pytest.raises(ValueError, match="wanted the directory of each of 1 teachers; got 0"):
        require_teachers(draft, tiny_target, one, [])
    content = json.loads((other / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    words["!"], words["#"] = words["#"], words["!"]
    renamed = changed(other, tmp_path / "renamed", "tokenizer.json", model=content["model"])
    with pytest.raises(ValueError, match="teacher 1, .* another vocabulary than the target: 2 tokens differ.*'!'"):
        require_teachers(draft, tiny_target, one, [renamed])
    smaller = changed(other, tmp_path / "smaller", "config.json", vocab_size=60)
    with pytest.raises(ValueError, match="says 60 tokens, and the draft may say token 66"):
        require_teachers(draft, tiny_target, one, [smaller])
    foreign = changed(other, tmp_path / "foreign", "config.json", model_type="gpt2")
    with pytest.raises(ValueError, match="teacher 1, .*, is a gpt2; wanted one of: llama"):
        require_teachers(draft, tiny_target, one, [foreign])
    (tmp_path / "renamed" / "tokenizer.json").unlink()
    (tmp_path / "renamed" / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match="renamed has no tokenizer.json, so its vocabulary can't be compared"):
        require_teachers(draft, tiny_target, one, [renamed])


def test_a_loss_that_reads_no_probabilities_is_refused() -> None:
    require_reader((), cross_entropy.Params())
    require_reader(beside(1.0), forward_kl.Params())
    with pytest.raises(ValueError, match='loss "cross_entropy" does not read what teachers say'):
        require_reader(beside(1.0), cross_entropy.Params())
