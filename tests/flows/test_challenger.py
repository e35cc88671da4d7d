"""A challenger over several windows: the flows, a real log, a real registry, and tiny models that are really trained.

Nothing is started for it: the reference engine answers, and tasks run as the functions that they are.
"""

import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from prefect import Task

from infra.consent import QueryRow
from infra.querylog import QueryLog
from infra.registry import Registry, Version
from infra.secret import NAME, NUM_BYTES
from models.engines import torch as reference
from models.recipe import Recipe, load_recipe
from models.sources import synthetic
from tasks.promote import roll_back
from tasks.stages.task import task
from tests.flows.conftest import answered, registry_of

pytestmark = pytest.mark.slow

Refresh = Callable[..., tuple[str, Version]]
Requests = Callable[..., list[QueryRow]]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """The tiny recipe; its gate calls a domain small below 20 conversations."""
    tiny = load_recipe("tiny")
    engine = reference.Params(num_draft_tokens=tiny.num_draft_tokens)
    gate = tiny.gate.model_copy(update={"floor_conversations": 20})
    return tiny.model_copy(update={"engine": engine, "gate": gate})


@pytest.fixture(scope="module", autouse=True)
def _plain_tasks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (import_module(f"flows.{name}") for name in ("build", "refresh", "adopt")):
            for name, value in vars(module).items():
                if isinstance(value, Task | task):
                    patch.setattr(module, name, value.fn)
        yield


@pytest.fixture(scope="module")
def tiny_build(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("challenger") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_HOME", str(home))
        home.mkdir()
        (home / NAME).touch(0o600)
        (home / NAME).write_bytes(bytes(NUM_BYTES))  # every split is the same each time
        import_module("flows.build").build.fn(recipe)
    return home


@pytest.fixture
def home(tiny_build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the build's home; what it names by absolute path stays where it is."""
    shutil.copytree(tiny_build, tmp_path / "home")
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def log(home: Path) -> QueryLog:
    return QueryLog(home / "queries.db")


@pytest.fixture
def registry(home: Path) -> Registry:
    return registry_of(home)


@pytest.fixture
def refresh(recipe: Recipe, home: Path) -> Refresh:
    """Return what runs a refresh of so many epochs; fewer are faster and learn less."""
    flow = import_module("flows.refresh").refresh

    def run(num_epochs: int = 2) -> tuple[str, Version]:
        distill = {"num_epochs": num_epochs}
        settings = recipe.refresh.model_copy(update={"distill": distill})
        outcome, version = flow.fn(recipe.model_copy(update={"refresh": settings}))
        return outcome, version

    return run


@pytest.fixture(scope="module")
def requests(tiny_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Requests:
    """Return what makes rows of a domain, other ones each time, asked with one key."""
    registry, taken = registry_of(tiny_build), dict[str, int]()
    target_dir = registry.download(registry.champion("target"), tmp_path_factory.mktemp("cache"))

    def make(domain: str, count: int, key: str | None = None) -> list[QueryRow]:
        first = taken.get(domain, 0)
        taken[domain] = first + count
        prompts = synthetic.prompts(synthetic.Params(domain=domain, count=first + count, num_groups=80))
        return answered(target_dir, prompts[first:], key)

    return make


def test_f31_an_idle_domain_refuses_nothing_and_a_rollback_while_a_refresh_trains_is_not_overwritten(
    requests: Requests, log: QueryLog, registry: Registry, refresh: Refresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As seen live: `code` was learned, then only `math` came, and of idle `code` too few conversations came back."""
    log.append(requests("code", 140))
    outcome, code = refresh(num_epochs=12)
    assert (outcome, code.lineage.gate) == ("promoted", "passed"), code.lineage.gate_reasons
    assert "code" in code.lineage.tau
    log.append(requests("math", 80))

    flow = import_module("flows.refresh")
    judge = flow.gate_draft

    def somebody_rolls_back_meanwhile(*args: object) -> object:
        roll_back.fn()
        return judge(*args)

    with monkeypatch.context() as patch:
        patch.setattr(flow, "gate_draft", somebody_rolls_back_meanwhile)
        outcome, math = refresh()
    assert (outcome, math.lineage.parent, log.cursor()) == ("outdated", code.number, 140)
    assert math.lineage.gate in ("passed", "undecided"), math.lineage.gate_reasons  # never refused for want of rows
    assert math.lineage.tau.keys() == {"chat", "code", "math"}  # small domains by their own names
    assert registry.champion("draft").number == 1

    outcome, again = refresh()
    assert outcome in ("promoted", "undecided"), again.lineage.gate_reasons
    assert (again.lineage.parent, again.lineage.continues, log.cursor()) == (1, None, 220)
    assert again.lineage.gate_test == code.lineage.gate_test + 1


def test_three_windows_of_two_keys_and_three_domains_are_none_refused_and_what_was_learned_is_kept(
    requests: Requests, log: QueryLog, registry: Registry, refresh: Refresh
) -> None:
    going_on = None
    for mix in ({"chat": 40, "code": 30}, {"code": 12, "math": 60}, {"chat": 20, "code": 20, "math": 30}):
        for key in ("one", "two"):
            log.append([row for domain, count in mix.items() for row in requests(domain, count // 2, key)])
        champion = registry.champion("draft").number
        outcome, snapshot = refresh()
        lineage = snapshot.lineage
        assert outcome in ("promoted", "undecided"), lineage.gate_reasons
        assert (lineage.parent, lineage.continues, log.stats().depth) == (champion, going_on, 0)
        assert lineage.state_uri
        going_on = snapshot.number if outcome == "undecided" else None
