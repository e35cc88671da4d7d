"""A draft that passed its gate and its probation and does worse live is rolled back by itself."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.events import DRAFT_ROLLED_BACK
from infra.post_promotion import ROLLED_BACK, PostPromotionTest, PostPromotionTests
from infra.processes import Child, wait_until
from infra.service_process import last_url
from infra.settings import Settings
from tests.drills.scene import register_changed
from tests.drills.spoiled import noisy
from tests.flows.conftest import Cli
from tests.infra.collector import collecting
from tests.world import Served

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
RECIPE = Path(__file__).parents[2] / "models" / "recipes" / "tiny.toml"
LOOK = "\n[post_promotion_test]\nperiod_s = 0.5\nper_look = 16\n"


def test_f34_a_draft_that_passed_and_does_worse_live_is_taken_back_within_200_requests(
    home: Path, tmp_path: Path, cli_in: Callable[[Path], Cli]
) -> None:
    cli, recipe = cli_in(home), tmp_path / "strict.toml"
    recipe.write_text('name = "tiny"\n' + RECIPE.read_text() + LOOK)
    worse, settings = register_changed(home, noisy(0.2, seed=0)), Settings(home=home)
    tests = PostPromotionTests(settings)

    def found() -> PostPromotionTest | None:
        return tests.find(worse, 1)

    environment = {"REDRAFT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    serve = [sys.executable, "-m", "flows.cli", "serve", "--recipe", str(recipe)]
    argv = [sys.executable, "-m", "flows.post_promotion", "--recipe", str(recipe)]
    with Child.start(serve, environment, home / "serve.log", "serve") as serving, collecting() as collector:
        wait_until(lambda: "serving model" in (home / "serve.log").read_text(), 240, serving, "the service")
        served = Served(last_url(settings), home)  # a command would start a process for each look
        with Child.start(argv, environment, home / "test.log", "post-promotion") as testing:
            cli.run("promote", str(worse))
            served.wait_for("the swap", lambda status: str(status["draft_version"]) == str(worse), 120)
            cli.run("traffic", "--recipe", str(recipe), "--domain", "chat")
            wait_until(lambda: (seen := found()) is not None and len(seen.compared) > 0, 240, testing, "a look")
            os.kill(testing.pid, signal.SIGKILL)
        orchestrated = environment | {"PREFECT_API_URL": collector.api}
        with Child.start(argv, orchestrated, home / "test.log", "post-promotion") as testing:
            cli.run("traffic", "--recipe", str(recipe), "--domain", "code")
            wait_until(lambda: (seen := found()) is not None and seen.outcome == ROLLED_BACK, 240, testing, "the end")
            served.wait_for("the swap back", lambda status: str(status["draft_version"]) == "1", 120)
            wait_until(lambda: len(collector.got) > 0, 60, testing, "an event")
        told = json.loads(cli.run("status", "--json").splitlines()[-1])
    seen = found()
    assert seen is not None
    [event] = collector.got
    assert (event["event"], event["resource"]["prefect.resource.name"]) == (DRAFT_ROLLED_BACK, str(worse))
    assert event["payload"] == {"previous": 1, "told": seen.told(), "evidence": seen.evidence}
    requests = [compared.seq for compared in seen.compared]
    assert len(set(requests)) == len(requests) <= 200
    assert [draft["champion"] for draft in told["drafts"]] == [False, True]
    assert told["drafts"][0]["reasons"].startswith("τ 1.")
    assert f"draft {worse} is quarantined: τ 1." in cli.run("status")
