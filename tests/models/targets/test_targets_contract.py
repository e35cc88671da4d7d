import hashlib
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from models import catalog
from models.params import BaseParams
from models.targets import describe, target_config

NAMES = [name for name in catalog.names("targets") if name != "smollm2"]  # tested by itself, as it takes half a minute


def params_of(name: str, other: Path) -> BaseParams:
    """Return settings of a target; those that need another one get the tiny target's directory."""
    needed = {"path": str(other), "tokenizer": {"name": "pretrained", "path": str(other)}}
    fields = catalog.load("targets", name).Params.model_fields
    return catalog.parse("targets", {"name": name} | {key: needed[key] for key in fields if fields[key].is_required()})


@pytest.mark.parametrize("name", NAMES)
def test_a_target_is_a_directory_that_loads_whole(name: str, tiny_target: Path, tmp_path: Path) -> None:
    module, params = catalog.load("targets", name), params_of(name, tiny_target)
    module.build(params, tmp_path)
    _, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert describe(tmp_path).vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))
    built, alone = target_config(tmp_path).to_dict(), module.config(params).to_dict()
    written = {"architectures", "dtype", "_name_or_path", "transformers_version", "redraft"}  # by whoever saves it
    assert {key: alone[key] for key in alone.keys() - written} == {key: built[key] for key in built.keys() - written}


@pytest.mark.parametrize("name", NAMES)
def test_the_tokenizer_by_itself_has_a_chat_template_and_an_end(name: str, tiny_target: Path) -> None:
    tokenizer = catalog.load("targets", name).tokenizer(params_of(name, tiny_target))
    assert tokenizer.chat_template
    assert tokenizer.eos_token_id is not None


def test_weights_are_hashed_once_and_if_changed(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    [weights] = target.glob("*.safetensors")
    before = describe(target)
    hashed, real = [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *read: (hashed.append(read), real(*read))[1])
    assert describe(target) == before
    assert not hashed
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert describe(target).sha256 != before.sha256
    assert len(hashed) == 1
