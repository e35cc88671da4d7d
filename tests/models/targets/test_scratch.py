from pathlib import Path

import pytest

from models import catalog
from models.params import BaseParams
from models.targets import describe, scratch, target_config


def params(**changes: object) -> BaseParams:
    table = {"name": "scratch", "tokenizer": {"name": "random"}, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1}
    return catalog.parse("targets", {**table, **changes})


def test_it_has_the_shape_that_was_asked_for_and_the_other_targets_tokenizer(tmp_path: Path, tiny_target: Path) -> None:
    scratch.build(params(intermediate_size=96, max_length=128), tmp_path)
    config, card = target_config(tmp_path), describe(tmp_path)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 128, 96)
    assert (config.num_key_value_heads, config.max_position_embeddings, config.tie_word_embeddings) == (1, 128, True)
    other = describe(tiny_target)
    assert card.tokenizer_sha256 == other.tokenizer_sha256
    assert card.chat_template_sha256 == other.chat_template_sha256


def test_the_seed_draws_the_weights(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        scratch.build(params(seed=seed, num_layers=1), tmp_path / name)
    one, again, other = (describe(tmp_path / name).sha256 for name in ("one", "again", "other"))
    assert one == again != other


def test_heads_that_can_not_be_shared_and_an_unknown_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        params(num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match=r'no method "rand" in targets \(did you mean "random"'):
        params(tokenizer={"name": "rand"})
