"""What a home holds of a target: its weights once, and not at all where they can stay where their owner has them."""

import shutil
from pathlib import Path

import pytest

from infra.artifacts import Artifact, check_manifest, open_artifact, publish, staged
from infra.registry import Registry
from infra.settings import load_settings
from models.core.evaluation.golden import GOLDEN_FILE
from models.params import BaseParams
from models.targets import describe, pretrained, random
from tasks.prepare_target import complete_target, prepare_target
from tasks.register import register_target
from tests.tasks.test_register import RECIPE

WEIGHTS = "model.safetensors"


@pytest.fixture
def samples(tmp_path: Path) -> Artifact:
    """A directory of answers, of which the reference outputs go to the target."""
    with staged(tmp_path / "samples") as directory:
        (directory / GOLDEN_FILE).write_text("{}")
    return publish(tmp_path / "samples", "samples")


def registered(params: BaseParams, samples: Artifact, registry: Registry) -> Path:
    """Return the directory that is served after a build."""
    target = complete_target.fn(prepare_target.fn(params), samples)
    version = register_target.fn(RECIPE, target)
    return registry.download(registry.get("target", version.number), load_settings().cache)


@pytest.mark.slow
def test_a_target_that_was_made_lies_in_a_home_once(home: Path, registry: Registry, samples: Artifact) -> None:
    served = registered(random.Params(), samples, registry)
    assert (served / GOLDEN_FILE).is_file()
    assert check_manifest(served)
    files = [path for path in home.rglob(WEIGHTS) if not path.is_symlink()]
    assert len(files) == 2  # names, of one file
    assert len({path.stat().st_ino for path in files}) == 1


@pytest.mark.slow
def test_a_target_of_the_users_own_stays_in_its_directory_and_is_refused_when_it_changes_there(
    home: Path, registry: Registry, samples: Artifact, tiny_target: Path, tmp_path: Path
) -> None:
    own = Path(shutil.copytree(tiny_target, tmp_path / "own"))
    params = pretrained.Params(path=str(own))
    served = registered(params, samples, registry)
    assert [path for path in home.rglob(WEIGHTS) if not path.is_symlink()] == []
    assert (served / WEIGHTS).resolve() == own / WEIGHTS
    assert describe(served).sha256 == describe(own).sha256
    prepared, content = prepare_target.fn(params), bytearray((own / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (own / WEIGHTS).write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors has sha256"):
        check_manifest(served)
    again = prepare_target.fn(params)
    assert again.sha256 != prepared.sha256
    (own / WEIGHTS).unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors leads to .*own/model\.safetensors, which is not there"):
        open_artifact(again)
