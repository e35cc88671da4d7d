"""What a refresh trains on and is held to."""

import hashlib
import itertools
import json
import random
from collections import Counter
from shutil import copy

import pytest
import torch
from transformers import AutoTokenizer

from infra.artifacts import Artifact
from infra.captured import CapturedFiles
from infra.consent import QueryRow
from infra.erase.job import Job
from infra.erase.snapshots import rewrite_snapshots
from infra.querylog import QueryLog
from infra.secret import NAME, NUM_BYTES
from infra.settings import load_settings
from infra.versions import Pair
from models.chats import ChatEncoder
from models.core.learning.hidden import Sample
from models.recipe import Refresh, load_recipe
from tasks.claim_window import advance_cursor, claim_window, hold_out, hold_out_past, hold_window, leave_window
from tasks.stages.samples import read_samples, regression_set_versions
from tasks.stages.split import MOST_OF_GROUP
from tests.tasks.made import pair_of, row_of, samples_files

REFRESH = Refresh(min_rows=40, max_rows=100, held_out_fraction=0.25, replay_per_domain=10)
NO_REPLAY = REFRESH.model_copy(update={"replay_per_domain": 0})


@pytest.fixture
def log(tmp_path, monkeypatch) -> QueryLog:
    """Return the query log of a fresh home whose secret, and so every split, is the same each time."""
    monkeypatch.setenv("REDRAFT_HOME", str(tmp_path))
    (tmp_path / NAME).touch(0o600)
    (tmp_path / NAME).write_bytes(bytes(NUM_BYTES))
    return QueryLog(load_settings().querylog)


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


def recipe_of(refresh: Refresh):
    return load_recipe("tiny").model_copy(update={"refresh": refresh})


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
    window = claim_window.fn(REFRESH)
    with pytest.raises(ZeroDivisionError), hold_window(window):
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


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt(), SystemExit(), OUT_OF_MEMORY])
def test_a_run_that_somebody_stops_or_a_gpus_memory_does_not_suffice_for_is_no_attempt(log, stopped_by):
    log.append([row(n) for n in range(REFRESH.max_rows)])
    for _ in range(5):
        window = claim_window.fn(REFRESH)
        with pytest.raises(type(stopped_by)), hold_window(window):
            raise stopped_by
    assert (log.stats().attempt, log.stats().set_aside) == (None, ())
    assert claim_window.fn(REFRESH) == window


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


def held(log, pair, first_samples, rows: list[QueryRow], refresh: Refresh = REFRESH) -> dict[str, list[Sample]]:
    """Append rows, take them as a window, and return its parts."""
    log.append(rows)
    window = claim_window.fn(refresh)
    parts = parts_of(hold_out.fn(recipe_of(refresh), pair, window, first_samples).samples)
    advance_cursor.fn(window)
    return parts


def clusters_of(samples: list[Sample]) -> set[str]:
    return {sample.cluster for sample in samples}


def words(number: int, length: int = 30) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 250) for _ in range(length)]


def test_window_replay_and_first_samples_are_mixed_and_no_cluster_is_on_two_sides(log, first_samples, pair):
    held(log, pair, first_samples, [row(n) for n in range(100)])
    again = [row(n, second_id=1 if n < 108 else 0) for n in range(100, 150)]
    parts = held(log, pair, first_samples, again + [row(n, prompt_ids=[n - 200, 1]) for n in range(200, 210)])
    train, held_out, probe = parts.values()

    assert any(one.id.startswith("t") for one in train)
    assert not clusters_of(train) & clusters_of(held_out)
    assert not clusters_of(train + held_out) & clusters_of(probe)
    assert len({one.id for one in train + held_out + probe}) == len(train + held_out + probe)
    assert "" not in clusters_of(train + held_out + probe)


def test_it_is_recorded_which_rows_a_snapshot_read_and_as_what_before_the_window_is_committed(log, first_samples, pair):
    held(log, pair, first_samples, [row(n) for n in range(100)])
    log.append([row(n) for n in range(100, 150)])
    window = claim_window.fn(REFRESH)
    parts = hold_out.fn(recipe_of(REFRESH), pair, window, first_samples)
    snapshot = parts.samples.path.name
    in_part = {part: read_samples(parts.samples, part) for part in ("train", "held_out", "regression")}
    seqs = {one.id: one.seq for one in log.rows(1, 150)}
    for part, samples in in_part.items():
        for sample in samples:
            if (seq := seqs.get(sample.id)) is not None:
                replayed = part == "train" and seq < window.first_seq
                assert log.erasures.reads_of([seq])[snapshot] == {"replay" if replayed else part: 1}
    read = log.erasures.reads_of(seqs.values())[snapshot]
    assert read["train"] > 0 and read["replay"] > 0 and read["held_out"] > 0 and read["regression"] > 0
    assert sum(read.values()) == len({one.id for samples in in_part.values() for one in samples} & seqs.keys())


def test_what_a_grammar_constrained_is_learnt_and_never_judges(log, first_samples, pair):
    log.append([row(n).model_copy(update={"structured": n % 2 == 1}) for n in range(99)])
    log.append([row(99, domain="chat").model_copy(update={"structured": True})])
    parts = hold_out.fn(recipe_of(NO_REPLAY), pair, claim_window.fn(NO_REPLAY), first_samples)
    structured = {one.id for one in log.rows(1, 100) if one.structured}
    train, *judge = (
        {one.id for one in read_samples(parts.samples, part)} for part in ("train", "held_out", "regression")
    )
    assert structured <= train
    assert not structured & set().union(*judge) and all(judge)
    assert parts.shares == {"code": 1.0}
    assert log.erasures.reads_of(range(1, 101))[parts.samples.path.name]["train"] > len(structured)
    past = hold_out_past.fn(recipe_of(NO_REPLAY), pair, first_samples)
    assert not structured & {one.id for one in read_samples(past.samples, "held_out")}


def test_what_was_held_out_in_one_window_is_trained_on_in_the_next(log, first_samples, pair):
    first = held(log, pair, first_samples, [row(n) for n in range(100)], NO_REPLAY)
    second = held(log, pair, first_samples, [row(n) for n in range(100, 200)], NO_REPLAY)
    assert len(first["held_out"]) > 8
    assert {one.id for one in first["held_out"]} <= {one.id for one in second["train"]}
    assert not {one.id for one in first["train"]} & {one.id for one in second["train"]}


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True], ids=["near copies", "a group of different ones"])
def test_a_large_new_cluster_is_scored_before_it_is_trained_on(log, first_samples, pair, named):
    rows = [row(n, prompt_ids=words(n)) for n in range(60)]
    turns = [words(n) if named else [*words(1000)[:-1], n] for n in range(100, 120)]
    rows += [row(100 + n, key="k", group="9" * 64 if named else "", prompt_ids=ids) for n, ids in enumerate(turns)]
    members = {one.id for one in rows[60:]}
    first = held(log, pair, first_samples, rows, NO_REPLAY)
    assert len(members & {one.id for one in first["held_out"]}) == (MOST_OF_GROUP if named else 20)
    assert not members & {one.id for one in first["train"] + first["regression"]}
    second = held(log, pair, first_samples, [row(n, prompt_ids=words(n)) for n in range(200, 300)], NO_REPLAY)
    assert {one.id for one in second["train"]} >= members


@pytest.mark.slow
def test_a_client_can_not_choose_the_side_of_its_prompts(tmp_path, monkeypatch, first_samples, pair):
    def unsalted_side(prompt_ids: list[int]) -> str:
        digest = hashlib.sha256(json.dumps(prompt_ids).encode()).digest()
        return "held_out" if int.from_bytes(digest[:8]) / 2**64 < REFRESH.held_out_fraction else "train"

    chosen = [
        prompt for prompt in ([n, m] for n in range(200) for m in range(9)) if unsalted_side(prompt) == "held_out"
    ]
    sides = []
    for home in ("one", "other"):
        monkeypatch.setenv("REDRAFT_HOME", str(tmp_path / home))
        log = QueryLog(load_settings().querylog)
        parts = held(log, pair, first_samples, [row(n, prompt_ids=prompt) for n, prompt in enumerate(chosen[:100])])
        assert 5 < sum(one.domain == "code" for one in parts["held_out"]) < 40
        sides.append({one.id for one in parts["held_out"]})
    assert sides[0] != sides[1]


def test_near_copies_and_turns_of_a_chat_stay_on_one_side(log, first_samples, pair, tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)

    def chat(number: int, turns: int) -> list[int]:
        asked = [{"role": "system", "content": f"you are number {number % 3}"}]
        for turn in range(turns):
            asked += [{"role": "user", "content": f"{number} {turn} " + "".join(map(chr, words(number, 40)))}]
            asked += [{"role": "assistant", "content": f"answer {number * turn}"}]
        return ChatEncoder.of(tokenizer).encode(asked[:-1])

    rows = [row(3 * n + turn, prompt_ids=chat(n, turn + 1)) for n in range(16) for turn in range(3)]
    rows += [row(100 + n, prompt_ids=[*words(n // 2), n]) for n in range(40)]
    parts = held(log, pair, first_samples, rows)
    part_of = {one.id: part for part, samples in parts.items() for one in samples}
    for n in range(16):
        of_chat = {part_of.get(f"row{3 * n + turn}") for turn in range(3)}
        assert len(of_chat) == 1 or of_chat == {"regression", None}, n
    for n in range(20):
        copies = {part_of.get(f"row{100 + 2 * n + copy}") for copy in range(2)}
        assert len(copies) == 1 or copies == {"regression", None}, n


@pytest.mark.slow
def test_an_idle_domain_keeps_its_probes_and_nothing_like_them_or_bridging_trains(log, first_samples, pair):
    first = held(log, pair, first_samples, [row(n, prompt_ids=words(n)) for n in range(100)])
    regression, trained = ([one for one in first[part] if one.domain == "code"] for part in ("regression", "train"))
    bridges = [a.prompt_ids[:24] + b.prompt_ids[:24] for a, b in zip(regression[3:6], trained[-3:], strict=True)]
    assert len(regression) == 25
    for window in range(1, 4):
        rows = [row(n, domain="math", prompt_ids=words(1000 * window + n)) for n in range(60)]
        rows = [one.model_copy(update={"id": f"{one.id}-{window}"}) for one in rows]
        alike = [one.prompt_ids[:-1] for one in regression[:3]] + bridges
        rows += [row(1000 * window + n, prompt_ids=[*ids, window]) for n, ids in enumerate(alike)]
        parts = held(log, pair, first_samples, rows)
        assert [one for one in parts["regression"] if one.domain == "code"] == regression
        assert not {one.id for one in rows[60:]} & {one.id for one in parts["train"] + parts["held_out"]}
        assert not clusters_of(regression) & clusters_of(parts["train"] + parts["held_out"])
    assert regression_set_versions(parts["regression"])["code"] == regression_set_versions(first["regression"])["code"]
    assert sum(one.domain == "math" for one in parts["regression"]) == 45


def test_the_first_drafts_held_out_conversations_fill_up_a_set_as_far_as_no_row_is_alike(log, first_samples, pair):
    parts = held(
        log, pair, first_samples, [row(n, prompt_ids=[n, 2]) for n in range(7)] + [row(n) for n in range(50, 99)]
    )
    assert sorted(one.id for one in parts["regression"] if one.domain == "chat") == sorted(
        f"h{n}" for n in range(7, 30)
    )


@pytest.mark.slow
def test_shares_are_those_of_the_window_and_what_it_gave_to_the_probe_sets_is_fresh_once(log, first_samples, pair):
    held(log, pair, first_samples, [row(n) for n in range(100)])
    log.append([row(n, domain="math" if n % 4 == 0 else "code") for n in range(100, 180)])
    window = claim_window.fn(REFRESH)
    parts = hold_out.fn(recipe_of(REFRESH), pair, window, first_samples)
    assert parts.shares == {"code": 0.75, "math": 0.25}
    assert parts.fresh
    regression = {one.id: one.domain for one in read_samples(parts.samples, "regression")}
    of_window = {one.id: one.domain for one in log.rows(window.first_seq, window.last_seq)}
    assert set(parts.fresh) <= regression.keys() & of_window.keys()
    assert {
        id: regression[id] for id in parts.fresh
    }.items() <= of_window.items()  # by their own names, in small sets too
    assert hold_out.fn(recipe_of(REFRESH), pair, window, first_samples) == parts


def test_what_judges_a_draft_stands_for_all_requests_of_its_group_probes_too(log, first_samples, pair):
    sizes = [1 + n % 5 for n in range(40)]
    names = [f"{n:064}" for n, size in enumerate(sizes) for _ in range(size)]
    log.append([row(n, key="k", group=name, prompt_ids=words(n)) for n, name in enumerate(names)])
    window = claim_window.fn(REFRESH.model_copy(update={"max_rows": 200}))
    parts = hold_out.fn(recipe_of(REFRESH), pair, window, first_samples)
    in_log = {one.id: one for one in log.rows(window.first_seq, window.last_seq)}
    groups = Counter(one.group for one in in_log.values())
    reserved = {one.id: one.weight for one in read_samples(parts.samples, "regression") if one.id in parts.fresh}
    assert reserved == {id: groups[in_log[id].group] for id in parts.fresh}
    assert max(reserved.values()) > 1
    held_out = Counter[str]()
    for one in read_samples(parts.samples, "held_out"):
        held_out[in_log[one.id].group] += one.weight
    assert held_out == {group: groups[group] for group in held_out}
    assert {1, 5} <= {groups[group] for group in held_out}


@pytest.mark.slow
def test_a_flood_of_a_new_domain_leaves_the_judging_of_others_as_it_was(log, first_samples, pair):
    """622 rows that would all fall on the held-out side of a split without a secret, and as many near-copies."""
    refresh = REFRESH.model_copy(update={"max_rows": 2000})

    def unsalted(prompt_ids: list[int]) -> float:
        return int.from_bytes(hashlib.sha256(json.dumps(prompt_ids).encode()).digest()[:8]) / 2**64

    def others(*numbers: int) -> list[QueryRow]:
        return [row(n, key=f"team-{n % 2}", prompt_ids=words(n)) for n in range(*numbers)]

    held(log, pair, first_samples, others(400), refresh)
    chosen = itertools.islice((prompt for n in itertools.count(9000) if unsalted(prompt := words(n)) < 0.25), 622)
    flood = [row(n, domain="flood", key="flooder", prompt_ids=prompt) for n, prompt in enumerate(chosen)]
    before = held(log, pair, first_samples, others(500, 700), refresh)
    during = held(log, pair, first_samples, [*flood, *others(700, 900)], refresh)
    after = held(log, pair, first_samples, others(900, 1100), refresh)

    def sizes(parts: dict[str, list[Sample]]) -> list[int]:
        return [sum(one.domain == "code" for one in parts[part]) for part in ("held_out", "regression")]

    for parts in (during, after):
        (held_out, regression), (held_out_before, regression_before) = sizes(parts), sizes(before)
        assert regression == regression_before == 100
        assert held_out > 0.6 * held_out_before
    flooded = [one for one in during["train"] + during["held_out"] if one.domain == "flood"]
    held_out_share = sum(one in during["held_out"] for one in flooded) / len(flooded)
    assert held_out_share == pytest.approx(0.25, abs=0.1)
    copies = [row(n, domain="copies", key="flooder", prompt_ids=[*words(1), n % 200]) for n in range(622)]
    last = held(log, pair, first_samples, [*copies, *others(1100, 1300)], refresh)
    assert sizes(last)[1] == 100
    assert sizes(last)[0] > 0.6 * sizes(before)[0]


@pytest.mark.slow
def test_a_client_that_puts_all_it_asks_into_one_group_stops_nobody(log, first_samples, pair):
    refresh = REFRESH.model_copy(update={"max_rows": 2000})
    names = itertools.count()

    def asked(number: int, key: str, group: str = "") -> list[QueryRow]:
        return [row(n, key=key, group=group, prompt_ids=words(n)) for n in itertools.islice(names, number)]

    def of(key: str, samples: list[Sample]) -> list[Sample]:
        keys = {one.id: one.key for one in log.rows(1, 9999)}
        return [one for one in samples if keys.get(one.id) == key]

    before = held(log, pair, first_samples, asked(400, "team") + asked(200, "client"), refresh)
    share = len(of("team", before["held_out"])) / 400
    windows = [
        held(log, pair, first_samples, asked(100, "team") + asked(100, "client", "9" * 64), refresh) for _ in range(4)
    ]
    for parts in windows:
        assert len(of("team", parts["held_out"])) > 0.6 * share * 100
        assert len(of("team", parts["train"])) > 50
        assert not clusters_of(parts["train"]) & clusters_of(parts["held_out"])
    judged_by = [of("client", parts["held_out"]) for parts in windows]
    for scored in judged_by[:3]:  # on one side, and where it is held out it stands for a twentieth of the traffic
        assert len(scored) <= MOST_OF_GROUP
        assert sum(one.weight for one in scored) <= 0.05 * 200
    assert len(judged_by[3]) > 10  # more than a quarter of the domain: no group any more


def test_a_draft_from_elsewhere_is_held_to_probes_and_to_rows_that_the_champion_has_not_seen(log, first_samples, pair):
    held(log, pair, first_samples, [row(n, prompt_ids=words(n)) for n in range(100)])
    log.append([row(n, prompt_ids=words(n)) for n in range(100, 120)] + [row(200, prompt_ids=[*words(0)[:-1], 7])])
    parts = parts_of(hold_out_past.fn(recipe_of(REFRESH), pair, first_samples).samples)
    assert {one.id for one in parts["held_out"]} == {f"row{n}" for n in range(100, 120)}
    assert parts["train"] == []
    assert sum(one.domain == "code" for one in parts["regression"]) == 25


@pytest.mark.slow
def test_drafts_are_held_to_the_targets_own_answers_where_imported_ones_are_unlike_and_an_erasure_finds_these(
    log, first_samples, target, store
):
    copy(store, load_settings().home / "mlflow.db")
    pair = pair_of(target, target)
    written = [3 + byte for byte in b"Paris is the capital of France."]
    imported = {"subject": "mine", "sampling": {"temperature": 1.0}}
    for number in range(100):
        made = row(number, prompt_ids=words(number))
        answer = [*written, 3 + number]  # an answer that is given twice counts once
        log.append([made.model_copy(update={"id": f"import-{number}", "completion_ids": answer, **imported})])
    parts = hold_out.fn(recipe_of(REFRESH), pair, claim_window.fn(REFRESH), first_samples)
    assert list(parts.unlike) == ["code"] and parts.unlike["code"].high < -0.2
    found = {part: [one for one in of if one.id.startswith("import-")] for part, of in parts_of(parts.samples).items()}
    assert all(found.values())
    assert all(one.completion_ids[:-1] == written for one in found["train"])
    assert not any(one.completion_ids[:-1] == written for part in ("held_out", "regression") for one in found[part])

    holding = [path for path in load_settings().artifacts.rglob("*.jsonl") if '"import-' in path.read_text()]
    assert len(holding) == 4  # the window's three parts, and what was answered
    rewrite_snapshots(Job(load_settings(), log, 0, log.erasures.begin(subjects=("mine",))))
    assert not any('"import-' in path.read_text() for path in load_settings().artifacts.rglob("*.jsonl"))
