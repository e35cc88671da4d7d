"""Windows that can't be trained on, that a client chose, or under which a person changes the champion."""

import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infra.artifacts import path_of, publish
from infra.consent import QueryRow
from infra.querylog import QueryLog
from models.recipe import load_recipe
from tasks.stages.samples import Split, read_samples
from tests.flows.conftest import Cli, registry_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
NO_TOKEN = 1_000_000
NUM_FLOOD = 622


def test_f30_a_window_whose_training_always_fails_is_set_aside_after_three_attempts_and_later_rows_train(
    home: Path, rows: list[QueryRow], cli_in: Callable[[Path], Cli]
) -> None:
    cli, log = cli_in(home), QueryLog(home / "queries.db")
    poison = {"prompt_ids": [NO_TOKEN] * 9, "completion_ids": [NO_TOKEN] * 9}
    spoiled = [rows[0].model_copy(update={**poison, "id": f"poison-{number}"}) for number in range(60)]
    spoiled = [row.model_copy(update={"completion_ids": [NO_TOKEN + n] * 9}) for n, row in enumerate(spoiled)]
    log.append(spoiled)
    for attempt in range(3):
        with cli.start("refresh", "--recipe", "tiny") as failing:
            told, _ = failing.communicate(timeout=120)
        assert failing.returncode != 0, told
        assert (registry_of(home).champion("draft").number, len(registry_of(home).versions("draft"))) == (1, 1)
        assert len(log.stats().set_aside) == (attempt == 2)
        if attempt == 0:
            log.append(rows)
    assert "draft 2" in cli.run("refresh", "--recipe", "tiny")
    window = registry_of(home).get("draft", 2).lineage.window
    assert window is not None
    assert (window.first_seq, window.last_seq, log.stats().depth) == (61, 60 + len(rows), 0)
    [aside] = log.stats().set_aside
    assert (aside.first_seq, aside.last_seq, aside.error.partition(":")[0]) == (1, 60, "IndexError")
    assert "rows 1–60 are set aside" in cli.run("status")


def test_f31_what_a_person_does_while_a_refresh_trains_is_never_overwritten(
    home: Path, rows: list[QueryRow], cli_in: Callable[[Path], Cli], tmp_path: Path
) -> None:
    cli, log, registry = cli_in(home), QueryLog(home / "queries.db"), registry_of(home)
    first = registry.champion("draft")
    assert first is not None
    files = registry.download(first, tmp_path / "cache")
    second = registry.register("draft", files, first.lineage.model_copy(update={"parent": 1}).to_tags())
    registry.promote("draft", second.number)
    log.append(rows)

    def while_a_refresh_trains(*command: str) -> str:
        """Run a command while a refresh is held up in its work, and return what the refresh said in the end."""
        with cli.start("refresh", "--recipe", "tiny") as refresh:
            while (attempt := log.stats().attempt) is None or not attempt.running:
                assert refresh.poll() is None, refresh.communicate()[0]
                time.sleep(0.01)
            os.kill(refresh.pid, signal.SIGSTOP)
            cli.run(*command)
            os.kill(refresh.pid, signal.SIGCONT)
            told, _ = refresh.communicate(timeout=120)
        assert refresh.returncode == 0, told
        return told

    assert "outdated: draft 3" in while_a_refresh_trains("rollback")
    assert registry.champion("draft").number == 1
    assert (registry.get("draft", 3).lineage.parent, log.windows.cursor()) == (
        2,
        0,
    )  # the rows wait for draft 1's challenger

    told = while_a_refresh_trains("promote", "3", "--force", "a person says so")
    assert "outdated: draft 4" in told
    assert registry.champion("draft").number == 3
    assert (registry.get("draft", 4).lineage.parent, log.windows.cursor()) == (1, 0)


def test_f33_a_flood_of_a_new_domain_chosen_for_one_side_leaves_later_refreshes_of_others_as_they_were(
    home: Path, rows: list[QueryRow], cli_in: Callable[[Path], Cli]
) -> None:
    cli, log, share = cli_in(home), QueryLog(home / "queries.db"), load_recipe("tiny").refresh.held_out_fraction
    rng = torch.Generator().manual_seed(0)
    flood: list[QueryRow] = []
    while len(flood) < NUM_FLOOD:
        ids = torch.randint(20, 120, (24,), generator=rng).tolist()
        side = int.from_bytes(hashlib.sha256(json.dumps(ids).encode()).digest()[:8]) / 2**64
        if side < share:  # the side that a hash without a secret would put it on
            row = rows[len(flood) % len(rows)]
            changed = {"id": f"flood-{len(flood)}", "domain": "flood", "key": "f" * 64, "prompt_ids": ids}
            flood.append(row.model_copy(update=changed))
    log.append([row.model_copy(update={"key": "a" * 64}) for row in rows[::2]])
    log.append(flood)
    log.append([row.model_copy(update={"key": "a" * 64}) for row in rows[1::2]])
    num_refreshes, chat = 0, set[int]()
    while log.stats().depth >= 60:
        cli.run("refresh", "--recipe", "tiny")
        num_refreshes += 1
        lineage = registry_of(home).versions("draft")[0].lineage
        assert lineage.gate in ("passed", "undecided"), lineage.gate_reasons
        assert {"chat", "code"} <= lineage.tau.keys()
        tested, trained, regression = (
            _domains(lineage.gate_data, part) for part in ("held_out", "train", "regression")
        )
        chat.add(regression["chat"])
        of_flood = tested["flood"] + trained["flood"]
        assert 0.05 < tested["flood"] / of_flood < 0.8  # by the client's choice all of it would be held out
        assert of_flood <= 2 * (tested["code"] + trained["code"])
    assert num_refreshes >= 2
    assert len(chat) == 1


def _domains(samples: str, part: Split) -> Counter[str]:
    return Counter(one.domain for one in read_samples(publish(path_of(samples), "samples"), part))
