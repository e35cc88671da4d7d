"""Names that gave way to the field's own words do not come back."""

import io
import re
import subprocess
import tokenize

import pytest

from tests.imports import ROOT

GONE = frozenset(
    (
        *("Again", "Alone", "Edge", "Front", "GivesWay", "Guard", "Judged"),
        *("Judging", "OtherReplica", "Pace", "Patience", "Peer", "ProbeSet", "ProbeSets"),
        *("Refusal", "Surroundings", "TAKEN_BACK", "Tally", "TappedLLM", "Turns", "Unfit"),
        *("Watch", "WatchParams", "Watches", "Wish", "Wishes", "answer_again", "few_rows"),
        *("gently", "judge_floors", "judge_outputs", "judged_against", "judged_on", "lookback", "open_peers"),
        *("patience_s", "probe_sets", "probe_tau", "produce", "watch_draft"),
    )
)
SUFFIXES = (".toml", ".html", ".lua", ".cpp")


def tracked(*suffixes: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in listed.split() if name.endswith(suffixes) and (ROOT / name).is_file()]


def identifiers(text: str) -> set[str]:
    return {
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NAME
    }


@pytest.mark.slow
def test_python_has_none_of_the_names_that_are_gone() -> None:
    found = {name: identifiers((ROOT / name).read_text()) & GONE for name in tracked(".py")}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_other_sources_have_none_of_them_either(suffix: str) -> None:
    gone = re.compile(rf"\b({'|'.join(sorted(GONE))})\b")
    found = {name: gone.findall((ROOT / name).read_text()) for name in tracked(suffix)}
    assert {name: names for name, names in found.items() if names} == {}
