"""What a refresh trains on and is held to."""

import hashlib
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from infra.artifacts import Artifact
from infra.consent import QueryRow
from infra.erase.job import Job
from infra.erase.snapshots import rewrite_snapshots
from infra.querylog import CapturedFiles, QueryLog
from infra.settings import load_settings
from infra.versions import Pair
from infra.windows import Window
from models.core.learning.hidden import Sample
from models.recipe import Refresh, load_recipe
from tasks.claim_window import Parts, advance_cursor, claim_window, hold_out, hold_out_past, hold_window, leave_window
from tasks.stages.samples import read_samples, regression_set_versions
from tasks.stages.split import MOST_OF_GROUP
from tests.tasks.made import pair_of, row_of, samples_files

REFRESH = Refresh(min_rows=40, max_rows=100, held_out_fraction=0.25, replay_per_domain=10)
NO_REPLAY = REFRESH.model_copy(update={"replay_per_domain": 0})


@pytest.fixture
def first_samples(tmp_path) -> Artifact:
    """Return what the first draft was trained on; its prompts are those of the log's rows 0 to 7."""
    train = [Sample(f"t{n}", "chat", [n, 1], [1, 2, 3]) for n in range(30)]
    held_out = [Sample(f"h{n}", "chat", [n, 2], [1, 2, 3]) for n in range(30)]
    return samples_files(tmp_path / "first", train, held_out)


@pytest.fixture
def pair(tiny_target) -> Pair:
    """Return a pair whose target is version 1; of its files only the tokenizer is looked at."""
    files = Artifact(uri=tiny_target.as_uri(), sha256="0" * 64, kind="any")
    return pair_of(files, files)


def row(
    number: int, second_id: int = 0, prompt_ids: list[int] | None = None, domain: str = "code", key="", group=""
) -> QueryRow:
    return row_of(
        f"{domain if domain != 'code' else 'row'}{number}",
        domain=domain,
        key=key or None,
        group=group or None,
        prompt_ids=prompt_ids or [number, second_id],
        completion_ids=[4, 5, 6],
        sampling={"temperature": 0},
    )


def test_too_few_rows_open_no_window_and_the_same_process_gets_its_window_again(log):
    log.append([row(n) for n in range(39)])
    assert claim_window.fn(REFRESH) is None
    log.append([row(39)])
    window = claim_window.fn(REFRESH)
    assert (window.first_seq, window.last_seq) == (1, 40)
    log.append([row(n) for n in range(40, 50)])
    assert claim_window.fn(REFRESH) == window
    advance_cursor.fn(window)
    assert log.windows.cursor() == 40


def test_hidden_states_captured_of_rows_go_once_their_window_was_trained_on(log):
    log.append([row(n) for n in range(REFRESH.max_rows + 1)])
    files, ids = CapturedFiles(log.database.file), log.ids()
    files.make()
    for row_id in ids:
        files.path_of(row_id).write_bytes(b"states")
    with pytest.raises(ZeroDivisionError), hold_window(claim_window.fn(REFRESH)):
        raise ZeroDivisionError
    assert len(list(files.folder.iterdir())) == REFRESH.max_rows + 1
    advance_cursor.fn(claim_window.fn(REFRESH))
    assert list(files.folder.iterdir()) == [files.path_of(ids[-1])]


def test_a_window_whose_training_always_fails_is_set_aside_with_its_error_and_later_rows_train(log):
    log.append([row(n) for n in range(REFRESH.max_rows + 40)])
    for _ in range(3):
        window = claim_window.fn(REFRESH)
        assert window.first_seq == 1
        with pytest.raises(ZeroDivisionError, match="^the loss\nis NaN$"), hold_window(window):
            raise ZeroDivisionError("the loss\nis NaN")
    (aside,) = log.stats().set_aside
    assert (aside.last_seq, aside.error) == (REFRESH.max_rows, "ZeroDivisionError: the loss is NaN")
    window = claim_window.fn(REFRESH)
    assert window.first_seq == REFRESH.max_rows + 1
    with hold_window(window):
        advance_cursor.fn(window)
    assert (log.stats().depth, log.stats().attempt, log.stats().set_aside) == (0, None, (aside,))


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt(), SystemExit(), OUT_OF_MEMORY], ids=repr)
def test_a_run_that_somebody_stops_or_a_gpus_memory_does_not_suffice_for_is_no_attempt(log, stopped_by):
    log.append([row(n) for n in range(40)])
    for _ in range(5):
        window = claim_window.fn(REFRESH)
        with pytest.raises(type(stopped_by)), hold_window(window):
            raise stopped_by
    assert (log.stats().attempt, log.stats().set_aside, claim_window.fn(REFRESH)) == (None, (), window)


def test_a_window_that_was_left_comes_again_and_nothing_was_counted(log):
    log.append([row(n) for n in range(40)])
    for _ in range(5):
        window = claim_window.fn(REFRESH)
        with hold_window(window):
            leave_window.fn(window)
    assert (log.stats().attempt, log.stats().set_aside, log.windows.cursor()) == (None, (), 0)
    assert claim_window.fn(REFRESH) == window


def test_what_a_run_raised_is_raised_again_where_the_log_can_not_be_written(log):
    log.append([row(n) for n in range(40)])
    window = claim_window.fn(REFRESH)
    with pytest.raises(ZeroDivisionError), hold_window(window):
        log.database.file.write_bytes(b"no database" * 1000)
        raise ZeroDivisionError
    log.database.file.unlink()


def parts_of(artifact: Artifact) -> dict[str, list[Sample]]:
    return {part: read_samples(artifact, part) for part in ("train", "held_out", "regression")}


class Windows:
    """What takes windows of a log, and what they are split into."""

    def __init__(self, log: QueryLog, pair: Pair, first_samples: Artifact) -> None:
        self.log, self.pair, self.first_samples = log, pair, first_samples

    def split(self, refresh: Refresh = REFRESH) -> tuple[Window, Parts]:
        """Claim a window of what waits, and split it."""
        window, recipe = claim_window.fn(refresh), load_recipe("tiny").model_copy(update={"refresh": refresh})
        return window, hold_out.fn(recipe, self.pair, window, self.first_samples)

    def past(self, refresh: Refresh = REFRESH) -> dict[str, list[Sample]]:
        recipe = load_recipe("tiny").model_copy(update={"refresh": refresh})
        return parts_of(hold_out_past.fn(recipe, self.pair, self.first_samples).samples)

    def held(self, rows: list[QueryRow], refresh: Refresh = REFRESH) -> dict[str, list[Sample]]:
        """Append rows, take them as a window, and return its parts."""
        self.log.append(rows)
        window, split = self.split(refresh)
        advance_cursor.fn(window)
        return parts_of(split.samples)


@pytest.fixture
def windows(log, pair, first_samples) -> Windows:
    return Windows(log, pair, first_samples)


def unsalted(prompt_ids: list[int]) -> float:
    """Return where a prompt would fall between 0 and 1 if splits were without a secret."""
    return int.from_bytes(hashlib.sha256(json.dumps(prompt_ids).encode()).digest()[:8]) / 2**64


def of_code(samples: list[Sample]) -> list[Sample]:
    return [one for one in samples if one.domain == "code"]


def clusters_of(samples: list[Sample]) -> set[str]:
    return {sample.cluster for sample in samples}


def words(number: int, length: int = 30) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 250) for _ in range(length)]


def test_window_replay_and_first_samples_are_mixed_and_no_cluster_is_on_two_sides(windows):
    windows.held([row(n) for n in range(100)])
    again = [row(n, second_id=1 if n < 108 else 0) for n in range(100, 150)]
    train, held_out, probe = windows.held(again + [row(n, prompt_ids=[n - 200, 1]) for n in range(200, 210)]).values()
    assert any(one.id.startswith("t") for one in train)
    assert not clusters_of(train) & clusters_of(held_out)
    assert not clusters_of(train + held_out) & clusters_of(probe)
    assert len({one.id for one in train + held_out + probe}) == len(train + held_out + probe)
    assert "" not in clusters_of(train + held_out + probe)


def test_it_is_recorded_which_rows_a_snapshot_read_and_as_what_before_the_window_is_committed(log, windows):
    windows.held([row(n) for n in range(100)])
    log.append([row(n) for n in range(100, 150)])
    window, split = windows.split()
    snapshot, seqs, wanted = split.samples.path.name, {one.id: one.seq for one in log.rows(1, 150)}, Counter()
    read = [(seqs[one.id], part) for part, of in parts_of(split.samples).items() for one in of if one.id in seqs]
    for seq, part in read:
        role = "replay" if part == "train" and seq < window.first_seq else part
        assert log.erasures.reads_of([seq])[snapshot] == {role: 1}
        wanted[role] += 1
    assert log.erasures.reads_of(seqs.values())[snapshot] == wanted
    assert wanted.keys() == {"train", "replay", "held_out", "regression"}


def test_what_a_grammar_constrained_is_learnt_and_never_judges(log, windows):
    log.append([row(n).model_copy(update={"structured": n % 2 == 1}) for n in range(99)])
    log.append([row(99, domain="chat").model_copy(update={"structured": True})])
    _, split = windows.split(NO_REPLAY)
    structured = {one.id for one in log.rows(1, 100) if one.structured}
    train, *judge = ({one.id for one in of} for of in parts_of(split.samples).values())
    assert structured <= train
    assert not structured & set().union(*judge) and all(judge)
    assert split.shares == {"code": 1.0}
    assert log.erasures.reads_of(range(1, 101))[split.samples.path.name]["train"] > len(structured)
    assert not structured & {one.id for one in windows.past(NO_REPLAY)["held_out"]}


def test_what_was_held_out_in_one_window_is_trained_on_in_the_next(windows):
    first, second = (windows.held([row(n) for n in range(at, at + 100)], NO_REPLAY) for at in (0, 100))
    assert len(first["held_out"]) > 8
    assert {one.id for one in first["held_out"]} <= {one.id for one in second["train"]}
    assert not {one.id for one in first["train"]} & {one.id for one in second["train"]}


@pytest.mark.slow
def test_a_client_can_not_choose_the_side_of_its_prompts(tmp_path, monkeypatch, first_samples, pair):
    prompts = ([n, m] for n in range(200) for m in range(9))
    chosen = [prompt for prompt in prompts if unsalted(prompt) < REFRESH.held_out_fraction][:100]
    sides = []
    for home in ("one", "other"):
        monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / home))
        windows = Windows(QueryLog(load_settings().querylog), pair, first_samples)
        parts = windows.held([row(n, prompt_ids=prompt) for n, prompt in enumerate(chosen)])
        assert 5 < len(of_code(parts["held_out"])) < 40
        sides.append({one.id for one in parts["held_out"]})
    assert sides[0] != sides[1]


@pytest.mark.slow
def test_an_idle_domain_keeps_its_probes_and_nothing_like_them_or_bridging_trains(windows):
    first = windows.held([row(n, prompt_ids=words(n)) for n in range(100)])
    regression, trained = (of_code(first[part]) for part in ("regression", "train"))
    bridges = [a.prompt_ids[:24] + b.prompt_ids[:24] for a, b in zip(regression[3:6], trained[-3:], strict=True)]
    assert len(regression) == 25
    for window in range(1, 4):
        rows = [row(n, domain="math", prompt_ids=words(1000 * window + n)) for n in range(60)]
        rows = [one.model_copy(update={"id": f"{one.id}-{window}"}) for one in rows]
        alike = [one.prompt_ids[:-1] for one in regression[:3]] + bridges
        rows += [row(1000 * window + n, prompt_ids=[*ids, window]) for n, ids in enumerate(alike)]
        parts = windows.held(rows)
        assert of_code(parts["regression"]) == regression
        assert not {one.id for one in rows[60:]} & {one.id for one in parts["train"] + parts["held_out"]}
        assert not clusters_of(regression) & clusters_of(parts["train"] + parts["held_out"])
    assert regression_set_versions(parts["regression"])["code"] == regression_set_versions(first["regression"])["code"]
    assert sum(one.domain == "math" for one in parts["regression"]) == 45


def test_the_first_drafts_held_out_conversations_fill_up_a_set_as_far_as_no_row_is_alike(windows):
    parts = windows.held([row(n, prompt_ids=[n, 2]) for n in range(7)] + [row(n) for n in range(50, 99)])
    assert {one.id for one in parts["regression"] if one.domain == "chat"} == {f"h{n}" for n in range(7, 30)}


@pytest.mark.slow
def test_shares_are_those_of_the_window_and_what_it_gave_to_the_probe_sets_is_fresh_once(log, windows):
    windows.held([row(n) for n in range(100)])
    log.append([row(n, domain="math" if n % 4 == 0 else "code") for n in range(100, 180)])
    window, split = windows.split()
    assert split.shares == {"code": 0.75, "math": 0.25}
    regression = {one.id: one.domain for one in read_samples(split.samples, "regression")}
    of_window = {one.id: one.domain for one in log.rows(window.first_seq, window.last_seq)}
    fresh = {id: regression[id] for id in split.fresh}  # by their own names, in small sets too
    assert fresh and fresh.items() <= of_window.items()
    assert windows.split() == (window, split)


def test_what_judges_a_draft_stands_for_all_requests_of_its_group_probes_too(log, windows):
    sizes = [1 + n % 5 for n in range(40)]
    names = [f"{n:064}" for n, size in enumerate(sizes) for _ in range(size)]
    log.append([row(n, key="k", group=name, prompt_ids=words(n)) for n, name in enumerate(names)])
    window, split = windows.split(REFRESH.model_copy(update={"max_rows": 200}))
    in_log = {one.id: one for one in log.rows(window.first_seq, window.last_seq)}
    groups = Counter(one.group for one in in_log.values())
    reserved = {one.id: one.weight for one in read_samples(split.samples, "regression") if one.id in split.fresh}
    assert reserved == {id: groups[in_log[id].group] for id in split.fresh}
    assert max(reserved.values()) > 1
    held_out = Counter[str]()
    for one in read_samples(split.samples, "held_out"):
        held_out[in_log[one.id].group] += one.weight
    assert held_out == {group: groups[group] for group in held_out}
    assert {1, 5} <= {groups[group] for group in held_out}


@pytest.mark.slow
def test_a_flood_of_a_new_domain_leaves_the_judging_of_others_as_it_was(windows):
    """622 rows that would all fall on the held-out side of a split without a secret, and as many near-copies."""
    refresh = REFRESH.model_copy(update={"max_rows": 2000})

    def others(*numbers: int) -> list[QueryRow]:
        return [row(n, key=f"team-{n % 2}", prompt_ids=words(n)) for n in range(*numbers)]

    def sizes(parts: dict[str, list[Sample]]) -> list[int]:
        return [len(of_code(parts[part])) for part in ("held_out", "regression")]

    windows.held(others(400), refresh)
    chosen = itertools.islice((prompt for n in itertools.count(9000) if unsalted(prompt := words(n)) < 0.25), 622)
    flood = [row(n, domain="flood", key="flooder", prompt_ids=prompt) for n, prompt in enumerate(chosen)]
    copies = [row(n, domain="copies", key="flooder", prompt_ids=[*words(1), n % 200]) for n in range(622)]
    before = windows.held(others(500, 700), refresh)
    during = windows.held([*flood, *others(700, 900)], refresh)
    after = windows.held(others(900, 1100), refresh)
    last = windows.held([*copies, *others(1100, 1300)], refresh)
    num_before, _ = sizes(before)
    for parts in (before, during, after, last):
        held_out, regression = sizes(parts)
        assert regression == 100
        assert held_out > 0.6 * num_before
    flooded = [one for one in during["train"] + during["held_out"] if one.domain == "flood"]
    held_out_share = sum(one in during["held_out"] for one in flooded) / len(flooded)
    assert held_out_share == pytest.approx(0.25, abs=0.1)


@pytest.mark.slow
def test_a_client_that_puts_all_it_asks_into_one_group_stops_nobody(log, windows):
    refresh = REFRESH.model_copy(update={"max_rows": 2000})
    names = itertools.count()

    def asked(number: int, key: str, group: str = "") -> list[QueryRow]:
        return [row(n, key=key, group=group, prompt_ids=words(n)) for n in itertools.islice(names, number)]

    def of(key: str, samples: list[Sample]) -> list[Sample]:
        keys = {one.id: one.key for one in log.rows(1, 9999)}
        return [one for one in samples if keys.get(one.id) == key]

    before = windows.held(asked(400, "team") + asked(200, "client"), refresh)
    share = len(of("team", before["held_out"])) / 400
    grouped = [windows.held(asked(100, "team") + asked(100, "client", "9" * 64), refresh) for _ in range(4)]
    for parts in grouped:
        assert len(of("team", parts["held_out"])) > 0.6 * share * 100
        assert len(of("team", parts["train"])) > 50
        assert not clusters_of(parts["train"]) & clusters_of(parts["held_out"])
    judged_by = [of("client", parts["held_out"]) for parts in grouped]
    for scored in judged_by[:3]:  # on one side, and where it is held out it stands for a twentieth of the traffic
        assert len(scored) <= MOST_OF_GROUP
        assert sum(one.weight for one in scored) <= 0.05 * 200
    assert len(judged_by[3]) > 10  # more than a quarter of the domain: no group any more


def test_a_draft_from_elsewhere_is_held_to_probes_and_to_rows_that_the_champion_has_not_seen(log, windows):
    windows.held([row(n, prompt_ids=words(n)) for n in range(100)])
    log.append([row(n, prompt_ids=words(n)) for n in range(100, 120)] + [row(200, prompt_ids=[*words(0)[:-1], 7])])
    parts = windows.past()
    assert {one.id for one in parts["held_out"]} == {f"row{n}" for n in range(100, 120)}
    assert parts["train"] == []
    assert len(of_code(parts["regression"])) == 25


@pytest.mark.slow
def test_drafts_are_held_to_the_targets_own_answers_where_imported_ones_are_unlike_and_an_erasure_finds_these(
    log, first_samples, target
):
    written = [3 + byte for byte in b"Paris is the capital of France."]
    imported = {"subject": "mine", "sampling": {"temperature": 1.0}}
    for number in range(100):
        answer = [*written, 3 + number]  # an answer that is given twice counts once
        said = {"id": f"import-{number}", "completion_ids": answer, **imported}
        log.append([row(number, prompt_ids=words(number)).model_copy(update=said)])
    _, split = Windows(log, pair_of(target, target), first_samples).split()
    assert list(split.unlike) == ["code"] and split.unlike["code"].high < -0.2
    said = {
        part: [one.completion_ids[:-1] == written for one in of if one.id.startswith("import-")]
        for part, of in parts_of(split.samples).items()
    }
    assert all(said.values()) and all(said["train"])
    assert not any(said["held_out"] + said["regression"])

    def holding() -> list[Path]:
        return [path for path in load_settings().artifacts.rglob("*.jsonl") if '"import-' in path.read_text()]

    assert len(holding()) == 4  # the window's three parts, and what was answered
    rewrite_snapshots(Job(load_settings(), log, 0, log.erasures.begin(subjects=("mine",))))
    assert holding() == []
