"""Data sets read with `datasets`: a local folder, and the error when no hub answers."""

import json
from pathlib import Path

import datasets
import pytest

from models.sources.huggingface import Params, prompts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of four questions, with the cache beside it."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    rows = [{"question": f"question {i}", "topic": "math"} for i in (1, 2, 3, 1)]
    (tmp_path / "set" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "set"


def test_rows_become_prompts_without_copies(folder: Path) -> None:
    found = prompts(Params(dataset=str(folder), column="question", domain="math"))
    assert [prompt.messages[0].content for prompt in found] == ["question 1", "question 2", "question 3"]
    assert found[0].group == f"{folder}:1"


def test_a_slice_of_a_split_can_be_asked_for(folder: Path) -> None:
    assert len(prompts(Params(dataset=str(folder), split="train[:2]", column="question", domain="math"))) == 2


def test_a_missing_column_is_refused_with_the_row(folder: Path) -> None:
    with pytest.raises(ValueError, match=r'row 1: no column "messages"; there are: question, topic'):
        prompts(Params(dataset=str(folder), domain="math"))


def test_an_unknown_split_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Unknown split"):
        prompts(Params(dataset=str(folder), split="tset", column="question", domain="math"))


def test_a_hub_that_cannot_be_reached_gives_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match='data set "nobody/nothing" is neither on a hub that can be reached'):
        prompts(Params(dataset="nobody/nothing"))
