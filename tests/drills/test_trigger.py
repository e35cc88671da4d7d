"""A refresh that is wanted while another runs, and while the orchestrator is down, comes once it can."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from infra.artifacts import staged
from infra.processes import Child, answers, free_port, wait_until
from infra.querylog import QueryLog
from infra.settings import load_settings
from infra.trigger_store import TriggerStore, now_ms
from infra.triggers import Due, Fell, Retry
from models.recipe import load_recipe
from tasks.promote import MADE_BY
from tests.flows.conftest import registry_of
from tests.infra.rows import row
from tests.tags import draft_tags

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
RECIPE = Path(__file__).parents[2] / "models" / "recipes" / "tiny.toml"
NUM_ROWS = 60


class Home:
    """A registry and a log in which all that a refresh trains is there already, so that a run takes seconds."""

    def __init__(self, folder: Path, store: Path) -> None:
        folder.mkdir()
        shutil.copy(store, folder / "mlflow.db")
        self.folder, self.log, self.registry = folder, QueryLog(folder / "queries.db"), registry_of(folder)
        self.trigger = TriggerStore(self.log.database.file)
        self.recipe = folder / "drill.toml"
        text = 'name = "tiny"\n' + RECIPE.read_text() + "\n[schedule]\nrefresh_interval_s = 86400\nretry_s = 1.0\n"
        self.recipe.write_text(text)
        made_by = {MADE_BY: json.dumps([load_recipe(self.recipe).target_tables])}
        self.registry.promote("target", self.register("target", **made_by))
        self.registry.promote("draft", self.register("draft"))

    def register(self, kind: str, **tags: str) -> int:
        tags = {"tau": '{"code": 1.9}'} | tags  # else the domain would want a refresh whatever was promoted
        directory = self.folder / "made" / kind / str(len(self.registry.versions(kind)))
        with staged(directory) as staging:
            (staging / "weights").write_text(str(tags))
        return self.registry.register(kind, directory, draft_tags() | tags).number

    def let_acceptance_fall(self) -> int:
        """Add requests of a domain that fell, and the draft that a run before trained on them; return its number."""
        champion = self.champion
        self.log.append([row(f"drill-{1000 * champion + number}", "code") for number in range(NUM_ROWS)])
        window = self.log.windows.claim("the run before", max_rows=400)
        assert window is not None
        self.log.windows.release(window)
        place = {"window_first_seq": window.first_seq, "window_last_seq": window.last_seq}
        tags = {name: str(seq) for name, seq in place.items()} | {"window_sha256": window.sha256}
        candidate = self.register("draft", parent=str(champion), gate="passed", **tags)
        self.trigger.tell({"code": Fell(draft=champion, promised=1.9, served=1.0, now_ms=now_ms())})
        return candidate

    @property
    def champion(self) -> int:
        found = self.registry.champion("draft")
        assert found is not None
        return found.number

    def is_due(self) -> bool:
        return isinstance(self.trigger.state().domains.get("code"), Due)

    def is_promoted(self, number: int) -> bool:
        seen = self.trigger.state()
        return self.champion == number and not seen.running and not seen.domains

    def orchestrator_is_missed(self) -> bool:
        look = self.trigger.state().last_look
        return look is not None and look.error != ""


def test_f32_a_refresh_wanted_while_one_runs_or_the_orchestrator_is_down_comes_once_it_can(
    store: Path, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home", store)
    port = free_port()
    api = f"http://127.0.0.1:{port}/api"
    variables = load_settings({"REDRAFT_HOME": str(home.folder)}).process_variables()
    variables |= {"REDRAFT_HOME": str(home.folder), "PREFECT_API_URL": api, "OMP_NUM_THREADS": "1"}
    server = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    runner = [sys.executable, "-m", "flows.deployments", "--recipe", str(home.recipe)]

    def start_server() -> Child:
        child = Child.start(server, variables, tmp_path / "prefect.log", "prefect")
        wait_until(lambda: answers(f"{api}/health"), 120, child, "the server")
        return child

    first = start_server()
    try:
        with Child.start(runner, variables, tmp_path / "runner.log", "the runner") as child:
            with home.trigger.run(Retry(first_s=1, most_s=1)) as end:
                candidate = home.let_acceptance_fall()
                wait_until(home.is_due, 60, child, "a refresh to be due behind the one that runs")
                end("failed", "refused")
            wait_until(lambda: home.is_promoted(candidate), 120, child, "the refresh behind it")

            for process in psutil.Process(first.pid).children(recursive=True):
                os.kill(process.pid, signal.SIGKILL)
            first.stop()
            candidate = home.let_acceptance_fall()
            wait_until(home.orchestrator_is_missed, 60, child, "a look in vain")
            with start_server():
                wait_until(lambda: home.is_promoted(candidate), 120, child, "the refresh that was wanted meanwhile")
    finally:
        first.stop()
        home.log.close()
