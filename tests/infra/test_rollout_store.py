"""A fleet's rows outlive who wrote them: in a file, or in a database that many hosts share."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from sqlalchemy import update

from infra.artifacts import staged
from infra.database import LEASE_S, Database
from infra.registry import Registry
from infra.rollout_store import Member, RolloutStore, fleets_of, note_tested
from infra.rollouts import Away, Fleet, Joined, Left, Loading, Named, Seen, Told
from infra.store import StoreUnavailable
from infra.tables import replicas
from infra.versions import Version, label
from models.types import RolloutParams
from tests.infra.rows import running_python
from tests.tags import draft_tags

Place = Path | str
PARAMS = RolloutParams(waves=(1.0,), pause_s=0)
ELSEWHERE = "another-boot pid:[1] 1"
FOLLOWS = """
import sys, time
from pathlib import Path
from infra.rollout_store import RolloutStore
from infra.rollouts import Joined, Loading, Seen
from models.types import RolloutParams
address, draft = sys.argv[1:]
store = RolloutStore(address if "://" in address else Path(address), "fleet", RolloutParams(waves=(1.0,), pause_s=0))
store.tell(Joined(names=("killed",)), Seen(name="killed", version="", proven=False, failed={}))
print(store.tell(Loading(name="killed", draft=draft)).row("killed").state, flush=True)
time.sleep(60)
"""


@pytest.fixture
def registry(store: Path, place: Place, tmp_path: Path) -> Registry:
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    return Registry(f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "artifacts", Database(place))


@pytest.fixture
def drafts(registry: Registry, tmp_path: Path) -> Iterator[Version]:
    """Drafts that become the champion, one after the other."""

    def champions() -> Iterator[Version]:
        for number in count():
            with staged(tmp_path / f"draft {number}") as directory:
                (directory / "weights").write_text(str(number))
            version = registry.register("draft", tmp_path / f"draft {number}", draft_tags())
            registry.promote("draft", version.number)
            yield version

    return champions()


def member(registry: Registry, place: Place, name: str, joins: bool = True) -> Member:
    store = RolloutStore(place, "fleet", PARAMS)
    if joins:
        store.tell(Joined(names=(name,)))
    return Member(store, registry, name, logged_as=name)


def follow(one: Member, registry: Registry, serving: Version | None, **failed: str) -> int | None:
    """Say what a replica serves, and return the number of the draft that it is to serve."""
    draft = "" if serving is None else label(serving)
    seen = Seen(name=one.name, version=draft, proven=serving is not None, failed=failed)
    found = one.follow(registry.champion("draft"), seen)
    return None if found is None else found.number


def both(registry: Registry, place: Place, serving: Version) -> tuple[Member, Member]:
    """Return two replicas that serve a good draft."""
    first, second = (member(registry, place, name) for name in ("first", "second"))
    for one in (first, second, first):
        follow(one, registry, serving)
    assert first.store.seen.good == (label(serving),)
    return first, second


def test_the_second_replica_gets_a_champion_when_the_first_one_has_it_and_the_test_passed(
    registry: Registry, place: Place, drafts: Iterator[Version]
) -> None:
    first, second = both(registry, place, old := next(drafts))
    new = next(drafts)
    assert (follow(second, registry, old), follow(first, registry, old)) == (old.number, new.number)
    assert (follow(first, registry, new), follow(second, registry, old)) == (new.number, old.number)
    assert (first.leads, second.leads) == (True, False)
    note_tested(place, old, PARAMS)
    assert follow(second, registry, old) == old.number
    note_tested(place, new, PARAMS)
    assert follow(second, registry, old) == new.number
    follow(second, registry, new)
    assert fleets_of(place)["fleet"].good == (label(new), label(old))


def test_a_replica_that_starts_gets_the_last_good_draft_and_the_first_of_all_the_champion(
    registry: Registry, place: Place, drafts: Iterator[Version]
) -> None:
    old, early = next(drafts), member(registry, place, "early", joins=False)
    assert early.follow(old, None) == old
    both(registry, place, old)
    next(drafts)
    last_good = early.follow(registry.champion("draft"), None)
    assert last_good is not None and last_good.number == old.number
    assert [row.name for row in early.store.seen.rows] == ["first", "second"]  # who starts has no row


def test_a_draft_that_two_replicas_refuse_is_told_to_the_registry_by_any_and_tried_again_when_it_is_cleared(
    registry: Registry, place: Place, drafts: Iterator[Version]
) -> None:
    first, second = both(registry, place, old := next(drafts))
    new = label(champion := next(drafts))
    for one in (first, second):
        assert follow(one, registry, old) == champion.number
        seen = Seen(name=one.name, version=label(old), proven=True, failed={new: "NaN"})
        refused = one.refused(seen)
        assert refused == ({} if one is first else {new: "2 of 2 replicas failed: NaN"})
    follow(first, registry, old)
    assert first.refused(Seen(name="first", version=label(old), proven=True, failed={})) == refused
    registry.revert("draft", champion.number, refused[new])
    RolloutStore(place, "fleet", PARAMS).tell(Told(draft=new))
    assert {follow(one, registry, old) for one in (first, second)} == {old.number}
    registry.store.client.delete_model_version_tag("draft", str(champion.number), "quarantined")
    registry.promote("draft", champion.number)
    assert (follow(first, registry, old), follow(second, registry, old)) == (champion.number, old.number)


def test_what_a_replica_read_before_another_champion_came_begins_no_rollout(
    registry: Registry, place: Place, drafts: Iterator[Version]
) -> None:
    first, _ = both(registry, place, next(drafts))
    late, new = next(drafts), next(drafts)
    first.store.tell(Named(champion=label(new)))
    assert first.store.tell(Named(champion=label(late))).candidate == label(new)


@pytest.mark.slow
def test_a_killed_replica_is_lost_at_once_and_whoever_is_left_goes_on(
    registry: Registry, place: Place, drafts: Iterator[Version]
) -> None:
    first, second = both(registry, place, old := next(drafts))
    first.store.tell(Away(name="first"), Away(name="second"))
    new = next(drafts)
    first.store.tell(Named(champion=label(new)))
    with running_python(FOLLOWS, place, label(new)) as (_, told):
        assert told == "loading"
        assert follow(second, registry, old) == old.number
    assert follow(second, registry, old) == new.number
    assert [*first.store.tell().lost] == ["killed"]


def test_a_row_of_another_host_is_lost_when_its_lease_ended_and_joins_again_when_it_lives(
    registry: Registry, place: Place, drafts: Iterator[Version]
) -> None:
    first, second = both(registry, place, old := next(drafts))
    held = {"process": ELSEWHERE, "lease_until_ms": 0}
    with Database(place).writing() as connection:
        connection.execute(update(replicas).where(replicas.c.name == "first").values(held))
    assert [row.name for row in second.store.tell().rows] == ["second"]
    assert follow(first, registry, old) == old.number
    assert [row.name for row in second.store.tell().rows] == ["second", "first"]


def test_who_takes_part_keeps_the_leases_of_its_rows_and_takes_them_along_in_the_end(place: Place) -> None:
    store, other = RolloutStore(place, "fleet", PARAMS), RolloutStore(place, "other", PARAMS)
    other.tell(Joined(names=("b",)))
    with store.taking_part():
        store.tell(Joined(names=("a", "c")), Left(names=("c",)))
        with Database(place).writing() as connection:
            connection.execute(update(replicas).values(lease_until_ms=Database(place).now_ms(connection) + 1000))
        assert store.renew()
        with Database(place).reading() as connection:
            left_ms = {row.name: row.lease_until_ms for row in connection.execute(replicas.select())}
        assert left_ms["a"] > left_ms["b"] + LEASE_S
    assert {name: [row.name for row in fleet.rows] for name, fleet in fleets_of(place).items()} == {"other": ["b"]}


def test_a_step_that_breaks_off_leaves_the_rows_as_they_were(place: Place) -> None:
    store = RolloutStore(place, "fleet", PARAMS)
    stands = store.tell(Joined(names=("a",)), Seen(name="a", version="1-x", proven=True, failed={}))
    database = Database(place)
    with pytest.raises(KeyboardInterrupt), database.writing() as connection:
        before, after = store._stepped(connection, [Away(name="a"), Joined(names=("b",))])
        store._write(connection, before, after)
        raise KeyboardInterrupt
    database.close()
    assert RolloutStore(place, "fleet", PARAMS).tell() == stands


def test_a_database_that_is_away_is_told_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = RolloutStore(tmp_path / "file" / "queries.db", "fleet", PARAMS)
    with pytest.raises((StoreUnavailable, OSError)):
        store.tell(Loading(name="a", draft="1-x"))
    assert store.seen == Fleet()
