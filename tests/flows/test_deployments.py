"""The deployments on a real Prefect server: the interval schedules, the wishes, and what is told by event."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled

from flows.deployments import deployments
from infra.artifacts import Artifact
from infra.events import APPROVAL_WANTED
from infra.processes import free_port, hold_port, wait_until
from infra.registry import open_registry
from infra.trigger_store import RunRequest
from infra.versions import Pair
from models.recipe import load_recipe
from tasks.promote import promote_candidate
from tasks.trigger.ask import prefect_server
from tests.tags import register
from tests.tasks.made import changed

pytestmark = pytest.mark.engine  # no engine, but a server that takes as long to start


@pytest.fixture
def api(orchestrator: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: orchestrator}):
        yield orchestrator


def runs_of(deployment: UUID) -> list[FlowRun]:
    async def read() -> list[FlowRun]:
        only = DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        async with get_client() as client:
            return await client.read_flow_runs(deployment_filter=only)

    return asyncio.run(read())


def cancel(run: UUID) -> None:
    async def end() -> None:
        async with get_client() as client:
            await client.set_flow_run_state(run, Cancelled(), force=True)

    asyncio.run(end())


def test_each_schedule_of_a_recipe_has_a_deployment_of_which_one_run_at_a_time_is_kept() -> None:
    tiny = load_recipe("tiny")
    assert [one.flow_name for one in deployments(tiny)] == ["build", "refresh", "clean"]
    often = changed(tiny, schedule={"retain_days": 30.0, "build_cron": "0 3 * * *"})
    found = {one.flow_name: one for one in deployments(often, work_pool="gpus")}
    crons = {name: found[name].schedules[0].schedule.cron for name in ("build", "retain")}
    assert crons == {"build": "0 3 * * *", "retain": "17 3 * * *"}
    assert found["retain"].parameters["recipe"]["schedule"]["retain_days"] == 30
    assert found["refresh"].work_pool_name == "gpus"
    for deployment in found.values():
        assert deployment.concurrency_limit == 1
        assert deployment.concurrency_options.collision_strategy.name == "CANCEL_NEW"


def test_the_clock_creates_a_scheduled_run_and_each_wish_for_a_refresh_one(api: str) -> None:
    recipe = load_recipe("tiny")
    build, refresh, clean = (deployment.apply() for deployment in deployments(recipe))
    wait_until(lambda: bool(runs_of(clean)), 120, None, "a scheduled run")
    scheduled = runs_of(clean)
    assert {run.state.type.name for run in scheduled if run.state} == {"SCHEDULED"}
    assert all(run.auto_scheduled for run in scheduled)
    assert runs_of(build) == runs_of(refresh) == []  # the recipe has no cron, and refreshes are asked for
    ask, wish = prefect_server("refresh/online"), RunRequest(log="a log")
    assert [ask(wish), ask(wish)] == [False, False]
    (asked,) = [run for run in runs_of(refresh) if not run.auto_scheduled]
    assert asked.parameters["recipe"]["name"] == "tiny"
    cancel(asked.id)
    assert ask(wish)
    assert not ask(wish.model_copy(update={"number": 1}))
    assert len([run for run in runs_of(refresh) if not run.auto_scheduled]) == 2


def test_an_orchestrator_that_is_down_or_knows_no_such_deployment_can_not_be_asked(api: str) -> None:
    with pytest.raises(ConnectionError, match="^deployment refresh/unknown was not found"):
        prefect_server("refresh/unknown")(RunRequest(log="a log"))
    with hold_port("127.0.0.1", free_port()) as unheard:
        away = f"http://127.0.0.1:{unheard.getsockname()[1]}/api"
        with temporary_settings({PREFECT_API_URL: away}), pytest.raises(ConnectionError):
            prefect_server("refresh/online")(RunRequest(log="a log"))


def test_a_draft_that_waits_for_a_persons_approval_is_told_by_event(
    api: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    shutil.copy(store, tmp_path / "mlflow.db")
    registry, files = open_registry(), Artifact(uri="file:///nowhere", sha256="0" * 64, kind="draft")
    target, champion, candidate = (
        register(registry, kind, tmp_path / "files", **tags)
        for kind, tags in (("target", {}), ("draft", {}), ("draft", {"parent": "1", "gate": "passed"}))
    )
    registry.promote("draft", champion.number)

    @flow
    def refresh() -> str:
        pair = Pair(target=target, draft=champion, target_files=files, draft_files=files)
        return promote_candidate.fn(pair, candidate, approve=True)

    def told() -> list[Any]:
        wanted = {"filter": {"event": {"name": [APPROVAL_WANTED]}}}
        found = httpx.post(f"{api}/events/filter", json=wanted, trust_env=False).raise_for_status()
        return list(found.json()["events"])

    assert refresh() == "waits for approval"
    wait_until(lambda: len(told()) > 0, 60, None, "an event")
    [event] = told()
    assert (event["resource"]["prefect.resource.name"], event["payload"]["champion"]) == ("draft 2", 1)
