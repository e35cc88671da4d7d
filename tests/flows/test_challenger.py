"""A challenger over several windows, drafts that return and drafts from elsewhere: the flows, a real log and registry,
and tiny models that are really trained.

Nothing is started for it: the reference engine answers, and tasks run as the functions that they are.
"""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefect import Task
from sqlalchemy import delete
from typer.testing import CliRunner

from flows import cli
from infra import priority
from infra.artifacts import check_manifest, staged
from infra.consent import QueryRow
from infra.database import Database
from infra.home import SECRET_BYTES, SPLIT_KEY
from infra.overview import overview
from infra.querylog import QueryLog
from infra.registry import Registry
from infra.settings import Settings
from infra.tables import champions
from infra.trigger_store import TriggerStore
from infra.triggers import Fell, Recovered
from infra.versions import Version
from models.drafts import eagle3
from models.engines import torch as reference
from models.recipe import Recipe, load_recipe, toml
from models.sources import synthetic
from tasks.claim_window import claim_window, hold_out, leave_window
from tasks.find_challenger import find_past
from tasks.promote import open_champions, promote_version, roll_back
from tasks.register import first_samples
from tasks.stages import task
from tests.conftest import shake
from tests.flows.conftest import answered, registry_of
from tests.models.published import published
from tests.tasks.made import changed

pytestmark = pytest.mark.slow

Refresh = Callable[..., tuple[str, Version]]
Requests = Callable[..., list[QueryRow]]


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    """The tiny recipe; its gate calls a domain small below 20 conversations."""
    tiny = load_recipe("tiny")
    engine = reference.Params(num_draft_tokens=tiny.num_draft_tokens)
    return changed(tiny.model_copy(update={"engine": engine}), gate={"floor_conversations": 20})


@pytest.fixture(scope="module", autouse=True)
def _plain_tasks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(priority, "NICENESS", 0)  # no service is there; on a busy machine all would wait for this
        for module in (import_module(f"flows.{name}") for name in ("build", "refresh", "adopt")):
            for name, value in vars(module).items():
                if isinstance(value, Task | task):
                    patch.setattr(module, name, value.fn)
        yield


@pytest.fixture(scope="module")
def tiny_build(recipe: Recipe, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("challenger") / "home"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDRAFT_HOME", str(home))
        home.mkdir()
        shutil.copy(store, home)
        (home / SPLIT_KEY).touch(0o600)
        (home / SPLIT_KEY).write_bytes(bytes(SECRET_BYTES))  # every split is the same each time
        idle = priority.Busy(home)
        idle.occupy(())  # a service that is on no core of ours, so that no operation looks whether it answers
        idle.close()
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


def run_refresh(recipe: Recipe, num_epochs: int = 2, **gate: Any) -> tuple[str, Version]:
    """Run a refresh of so many epochs; fewer are faster and learn less."""
    few = changed(recipe, refresh={"distill": {"num_epochs": num_epochs}}, gate=gate)
    outcome, version = import_module("flows.refresh").refresh.fn(few)
    return outcome, version


@pytest.fixture
def refresh(recipe: Recipe, home: Path) -> Refresh:
    return partial(run_refresh, recipe)


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


def test_a_recipe_of_another_target_than_the_champions_claims_no_window(
    requests: Requests, log: QueryLog, recipe: Recipe, home: Path
) -> None:
    log.append(requests("chat", 60))
    with pytest.raises(ValueError, match='"seed": 5.* but target 1, the champion, was made by'):
        run_refresh(changed(recipe, target={"seed": 5}))
    assert (log.windows.last(), log.stats().attempt) == (None, None)


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
    assert (outcome, math.lineage.parent, log.windows.cursor()) == ("outdated", code.number, 140)
    assert math.lineage.gate in ("passed", "undecided"), math.lineage.gate_reasons  # never refused for want of rows
    assert math.lineage.tau.keys() == {"chat", "code", "math"}  # small domains by their own names
    assert registry.champion("draft").number == 1

    outcome, again = refresh()
    assert outcome in ("promoted", "undecided"), again.lineage.gate_reasons
    assert (again.lineage.parent, again.lineage.continues, log.windows.cursor()) == (1, None, 220)
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


@pytest.fixture(scope="module")
def forgetful(tiny_build: Path, recipe: Recipe, requests: Requests, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which draft 2, which forgot all that draft 1 knew, took its place, and requests of `chat` wait."""
    home, made = tmp_path_factory.mktemp("forgetful") / "home", tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_build, home)
    registry = registry_of(home)
    first, target = registry.get("draft", 1), registry.download(registry.champion("target"), made)
    head = eagle3.load(registry.download(first, made), target)
    shake(head, 0.3, seed=0)
    with staged(made / "forgetful") as directory:
        eagle3.save(head, directory)
    told = {"parent": 1, "gate": "passed", "gate_test": 1, "state_uri": "", "state_sha256": ""}
    second = registry.register("draft", made / "forgetful", first.lineage.model_copy(update=told).to_tags())
    registry.promote("draft", second.number)
    log = QueryLog(home / "queries.db")
    log.append(requests("chat", 120))
    log.close()
    return home


class Returning:
    """A copy of that home, in which it is seen that `chat` fell."""

    def __init__(self, home: Path, recipe: Recipe) -> None:
        self.recipe, self.settings = recipe, Settings(home=home)
        self.log, self.registry = QueryLog(home / "queries.db"), registry_of(home)
        self.trigger = TriggerStore(self.log.database.file)
        self.refresh: Refresh = partial(run_refresh, recipe)
        self.fall()

    def fall(self) -> None:
        self.trigger.tell({"chat": Fell(draft=2, promised=1.9, served=1.1, now_ms=1)})

    def found(self, pool: int = 3) -> int | None:
        """Return the draft that would be tried again."""
        pair, recipe = open_champions.fn(), changed(self.recipe, refresh={"pool": pool})
        window = claim_window.fn(recipe.refresh)
        parts = hold_out.fn(recipe, pair, window, first_samples(pair.draft))
        past = find_past.fn(recipe, pair, window, parts)
        leave_window.fn(window)
        return None if past is None else past.version.number

    @property
    def numbers(self) -> list[int]:
        return [version.number for version in self.registry.versions("draft")]

    @property
    def num_trained(self) -> int:
        return len(self.registry.store.recorded("distill"))


@pytest.fixture
def back(forgetful: Path, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Returning:
    shutil.copytree(forgetful, tmp_path / "home")
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / "home"))
    return Returning(tmp_path / "home", recipe)


def test_traffic_that_comes_back_brings_its_draft_back_and_nothing_is_trained(back: Returning) -> None:
    before = back.num_trained
    outcome, draft = back.refresh()
    lineage = draft.lineage
    assert (outcome, lineage.returns, lineage.gate) == ("promoted", "draft 1 returns for chat", "passed")
    assert draft.sha256 == back.registry.get("draft", 1).sha256
    assert (lineage.gated_against, lineage.gate_test, lineage.window, lineage.continues) == (2, 1, None, None)
    assert lineage.samples_uri == back.registry.get("draft", 1).lineage.samples_uri
    champion = back.registry.champion("draft")
    assert (champion.number, champion.previous, back.registry.get("draft", 1).previous) == (3, 2, None)
    assert (back.num_trained, back.log.windows.cursor(), back.log.stats().depth) == (before, 0, 120)
    assert back.trigger.state().domains == {}

    back.fall()
    outcome, trained = back.refresh(num_epochs=1)  # draft 2 is not better, and draft 3 learns from the same rows
    assert (trained.lineage.parent, trained.lineage.gate_test, back.log.windows.cursor()) == (3, 1, 120)
    assert outcome in ("promoted", "undecided"), trained.lineage.gate_reasons


def test_a_run_that_dies_before_a_draft_that_returns_is_promoted_leaves_that_to_the_next(
    back: Returning, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(import_module("flows.refresh"), "promote_candidate", dies)
        with pytest.raises(KeyboardInterrupt):
            back.refresh()
    assert (back.registry.champion("draft").number, back.numbers, back.log.windows.cursor()) == (2, [3, 2, 1], 0)
    outcome, draft = back.refresh()
    assert (outcome, draft.number, back.numbers, back.log.windows.cursor()) == ("promoted", 3, [3, 2, 1], 0)


def test_a_past_draft_that_does_not_pass_is_refused_and_the_rows_are_trained_on_in_the_same_run(
    back: Returning,
) -> None:
    outcome, trained = back.refresh(num_epochs=1, alpha_total=1e-9)
    refused = back.registry.get("draft", 3).lineage
    assert (refused.returns, refused.gate, refused.gate_test) == ("draft 1 returns for chat", "refused", 1)
    assert "no gain shown" in refused.gate_reasons
    assert (trained.number, trained.lineage.parent, trained.lineage.gate_test) == (4, 2, 2)
    assert (outcome, back.log.windows.cursor()) == ("undecided", 120), trained.lineage.gate_reasons


def test_a_draft_that_returns_waits_for_a_person_where_one_decides_and_learning_goes_on(back: Returning) -> None:
    outcome, draft = back.refresh(promote="approve")
    assert (outcome, draft.number, back.registry.champion("draft").number) == ("waits for approval", 3, 2)
    told = "approval of draft 3, which passed its gate (draft 1 returns for chat): redraft promote 3"
    assert overview(back.settings).waiting.words == told
    assert back.log.windows.cursor() == 0
    _, trained = back.refresh(num_epochs=1, promote="approve")
    assert (trained.number, trained.lineage.parent, back.log.windows.cursor()) == (4, 2, 120)
    promote_version.fn(3)
    assert back.registry.champion("draft").number == 3


def test_a_past_draft_is_tried_only_where_a_domain_fell_and_never_one_found_bad(back: Returning) -> None:
    assert [back.found(), back.found(pool=0)] == [1, None]
    back.trigger.tell({"chat": Recovered()})
    assert back.found() is None
    back.trigger.tell({"math": Fell(draft=2, promised=1.9, served=1.1, now_ms=1)})
    assert back.found() is None  # there are no rows of it
    back.fall()
    assert back.found() == 1
    back.registry.quarantine("draft", 1, "another output")
    assert back.found() is None


@pytest.fixture
def elsewhere(
    tiny_build: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_environment: None
) -> Path:
    """A home with everything of a build but its registry, so that nothing is served."""
    home = tmp_path / "home"
    shutil.copytree(tiny_build, home, ignore=shutil.ignore_patterns("mlflow.db*", "cache"))
    shutil.copy(store, home)
    with Database(home / "queries.db").writing() as connection:
        connection.execute(delete(champions))
    monkeypatch.setenv("REDRAFT_HOME", str(home))
    flow = import_module("flows.adopt")
    monkeypatch.setattr(flow, "adopt", flow.adopt.fn)
    return home


def test_the_first_draft_is_served_a_better_one_passes_the_gate_and_a_worse_one_does_not(
    elsewhere: Path, tiny_build: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    of_build, registry = registry_of(tiny_build), registry_of(elsewhere)
    first, target = (of_build.download(of_build.get(kind, 1), tmp_path / "cache") for kind in ("draft", "target"))
    tiny = load_recipe("tiny")
    recipe = tiny.model_copy(update={"engine": reference.Params(num_draft_tokens=tiny.num_draft_tokens)})
    file = tmp_path / "tiny.toml"
    file.write_text(toml(recipe.model_dump(mode="json", exclude_none=True, exclude={"serve", "demo"})))

    def publish(head: Any, name: str, *layout: Any) -> Path:
        """Publish a head as somebody else would."""
        (tmp_path / name).mkdir()
        eagle3.save(head, tmp_path / name)
        return published(tmp_path / name, target, tmp_path / f"{name} published", *layout)

    def noise(seed: int) -> Path:
        """Publish a head that drafts badly, and was made for shorter texts than the target."""
        shake(head := eagle3.create(eagle3.Params(vocab_size=128), target, np.arange(259)), 0.3, seed)
        return publish(head, f"noise {seed}", "native", lambda config, _: config.update(max_position_embeddings=512))

    def run(*arguments: str | Path) -> str:
        done = CliRunner().invoke(cli.app, ["import-draft", *map(str, arguments), "--recipe", str(file)])
        assert done.exit_code == 0, done.output
        return done.output

    output = run(noise(1))
    assert "promoted: draft 1, τ chat 1." in output
    assert "its files say that it was made for 512 tokens" in output
    assert registry.champion("target").number == registry.champion("draft").number == 1
    one = registry.get("draft", 1)
    assert (one.lineage.parent, one.lineage.gate, one.lineage.source) == (
        None,
        None,
        str(tmp_path / "noise 1 published"),
    )
    assert float(one.tags["golden_tau"]) >= 1

    shake(trained := eagle3.load(first, target), 1e-3, seed=0)
    ours = publish(trained, "trained", "speculators")
    output = run(ours)
    assert "registered: draft 2" in output
    assert "add --promote" in output and "made for" not in output
    assert registry.champion("draft").number == 1

    assert "promoted: draft 3" in run(ours, "--promote")
    third = registry.champion("draft")
    assert third.number == 3
    assert (third.tags["gate"], third.tags["gated_against"], third.tags["gate_test"]) == ("passed", "1", "1")
    assert (third.lineage.parent, third.tags["line"]) == (None, one.tags["line"])
    assert third.tags["source_sha256"] == registry.get("draft", 2).tags["source_sha256"]
    check_manifest(registry.download(third, tmp_path / "again"))

    assert "already trained: draft 3" in run(ours, "--promote")
    output = run(noise(2), "--promote")
    assert "refused: draft 4" in output
    assert "no gain shown" in output or "a loss is shown" in output
    fourth = registry.get("draft", 4)
    assert (fourth.tags["gate"], fourth.tags["gated_against"], fourth.tags["gate_test"]) == ("refused", "3", "1")
    with caplog.at_level("INFO"):
        import_module("flows.build").build.fn(recipe)
    assert "draft 3 stays: it came from" in caplog.text
    assert registry.champion("draft").number == 3
