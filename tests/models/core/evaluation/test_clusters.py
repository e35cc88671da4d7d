import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.chats import ChatEncoder
from models.core.evaluation.clusters import (
    MAX_GROUP_SHARE,
    MOST_OF_FEW,
    SKETCH_SIZE,
    first_turn,
    join,
    join_groups,
    num_tests,
    sketch,
    turn_marks,
)
from models.targets.random import byte_tokenizer
from tests.growth import grows_linearly

SECRET = b"s" * 32


def words(number: int, length: int = 40) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(50_000) for _ in range(length)]


def names(turns, domains=None, secret=SECRET, groups=None) -> list[str]:
    domains = domains or ["code"] * len(turns)
    alike = join([sketch(turn, secret) for turn in turns], domains)
    return join_groups(alike, domains, groups or [None] * len(turns))


def test_equal_turns_and_near_copies_are_one_cluster_and_others_are_not():
    turn = words(0)
    named = names([turn, words(1), turn, [*turn[:20], 7, *turn[20:]], turn[:25] + words(2)[:10], words(3)[:3]])
    assert named[0] == named[2] == named[3] == named[4]
    assert len({named[0], named[1], named[5]}) == 3


def test_a_row_that_bridges_clusters_joins_them_under_the_name_of_the_earliest():
    left, right = words(0), words(1)
    apart = names([left, right])
    assert len(set(apart)) == 2
    assert names([left, right, left[:25] + right[:25]]) == [apart[0]] * 3


def test_what_a_domain_words_alike_joins_nothing_and_the_fillings_of_a_rare_template_are_joined():
    common, rare = words(10**6, 30), words(10**6 + 1, 30)
    turns = [common + words(n, 20) for n in range(200)] + [rare + words(1000 + n, 20) for n in range(8)]
    named = names(turns)
    assert len(set(named[:200])) == 200
    assert len(set(named[200:])) == 1
    assert named[200] not in named[:200]


def test_a_template_is_common_in_its_own_domain_only():
    common = words(10**6, 30)
    turns = [common + words(n, 10) for n in range(200)] + [words(5000 + n) for n in range(200)]
    named = names([*turns, common + words(9000, 10)], ["code"] * 200 + ["chat"] * 201)
    assert len(set(named)) == 401


def test_a_sketch_is_small_however_long_the_turn_and_there_is_one_of_the_shortest():
    assert [len(sketch(turn, SECRET).grams) for turn in (words(0, 5000), [1], [])] == [SKETCH_SIZE, 1, 1]
    assert join([], []) == join_groups([], [], []) == []


def test_nobody_without_the_secret_can_tell_names_or_sketches():
    turn = words(0)
    assert names([turn]) == names([turn]) != names([turn], secret=b"t" * 32)
    assert not set(sketch(turn, SECRET).grams) & set(sketch(turn, b"t" * 32).grams)


@pytest.mark.parametrize(("kept", "joined"), [(30, True), (5, False)])
def test_long_turns_join_by_how_much_they_share(kept, joined):
    long = words(0, 400)
    assert (len(set(names([long, long[: kept * 10] + words(1, 400 - kept * 10)]))) == 1) == joined


@pytest.mark.slow
def test_links_are_those_of_the_exact_resemblance_but_for_few():
    rng = random.Random(0)
    pairs = [(words(2 * n), words(2 * n)[: (cut := rng.randrange(41))] + words(2 * n + 1)[cut:]) for n in range(500)]
    wrong = 0
    for one, other in pairs:
        left, right = ({tuple(turn[start : start + 5]) for start in range(36)} for turn in (one, other))
        exact = len(left & right) / len(left | right)
        if not 0.12 < exact < 0.3:
            wrong += (len(set(names([one, other]))) == 1) != (exact >= 0.2)
    assert wrong <= 5


@pytest.mark.slow
def test_time_grows_linearly_with_rows_and_with_their_length():
    sketches = [sketch(words(n % 9000, 100), SECRET) for n in range(10_000)]
    domains = ["code"] * len(sketches)
    assert len(set(join(sketches, domains))) == 9000
    assert grows_linearly(lambda: join(sketches[:2500], domains[:2500]), lambda: join(sketches, domains))
    turns = {length: [words(n, length) for n in range(20)] for length in (1000, 4000)}
    assert grows_linearly(*(lambda turns=some: [sketch(turn, SECRET) for turn in turns] for some in turns.values()))
    assert sum(one.grams.nbytes for one in sketches) / len(sketches) <= SKETCH_SIZE * np.dtype(np.uint64).itemsize


def test_copies_with_a_token_changed_are_one_cluster_however_many_they_are():
    copied = words(10**6)
    turns = [words(n) for n in range(50)] + [[*copied[:-1], n] for n in range(200)]
    named = names(turns)
    assert len(set(named[50:])) == 1
    assert len(set(named)) == 51


def test_a_group_is_one_cluster_with_all_that_its_members_resemble_and_others_are_not():
    turns = [*map(words, range(6)), [*words(0)[:20], 7, *words(0)[20:]]]  # the last a near copy without a group
    named = names(turns, groups=["a", None, "a", "b", "b", None, None])
    assert named[0] == named[2] == named[6] and named[3] == named[4]
    assert len(set(named)) == 4


@pytest.mark.parametrize(("held", "asked"), [(MOST_OF_FEW, MOST_OF_FEW), (50, 200)])
def test_a_group_of_more_than_a_quarter_of_its_domain_joins_nothing(held, asked):
    assert held <= max(MOST_OF_FEW, MAX_GROUP_SHARE * asked)
    turns = [words(n) for n in range(asked)]
    inside = ["all" if n < held else None for n in range(asked)]
    assert len(set(names(turns, groups=inside)[:held])) == 1
    turns, inside = [*turns, words(asked)], ["all", *inside]
    assert names(turns, groups=inside) == names(turns)


@pytest.mark.parametrize(
    ("sizes", "alone"), [({}, 0), ({"a": 20}, 0), ({"a": 21}, 3), ({"a": 30, "b": 8, "c": 90}, 200), ({"a": 1}, 3)]
)
def test_as_many_conversations_count_as_groups_leave_clusters(sizes, alone):
    groups = [name for name, size in sizes.items() for _ in range(size)] + [None] * alone
    turns = [words(number) for number in range(len(groups))]
    assert num_tests(Counter(groups)) == len(set(names(turns, groups=groups)))


def test_a_group_of_several_domains_joins_those_of_which_it_is_a_small_part():
    turns = [words(n) for n in range(130)]
    domains, groups = ["code"] * 100 + ["mine"] * 30, [None] * 90 + ["one"] * 40
    named = names(turns, domains, groups=groups)
    assert len(set(named[90:100])) == 1
    assert len(set(named)) == 121


@pytest.mark.slow
@given(rows=st.lists(st.tuples(st.integers(0, 8), st.sampled_from("ab"), st.sampled_from([None, *"xyz"])), max_size=30))
def test_what_is_alike_or_grouped_is_together_and_groups_only_ever_join(rows):
    turns, domains = [words(number) for number, _, _ in rows], [domain for _, domain, _ in rows]
    groups = [group for _, _, group in rows]
    named, alone = names(turns, domains, groups=groups), names(turns, domains)
    held, sizes = Counter(zip(domains, groups, strict=True)), Counter(domains)
    small = {key for key, number in held.items() if number <= max(MOST_OF_FEW, MAX_GROUP_SHARE * sizes[key[0]])}
    for one in range(len(rows)):
        for other in range(one):
            same_text = turns[one] == turns[other]
            members = groups[one] is not None and groups[one] == groups[other]
            if same_text or (members and {(domains[n], groups[n]) for n in (one, other)} <= small):
                assert named[one] == named[other]
            if alone[one] == alone[other]:
                assert named[one] == named[other]
    if not any(groups):
        assert named == alone


TOKENIZER = byte_tokenizer()


def first_of(*turns: tuple[str, str], tokenizer=TOKENIZER) -> str:
    ids = ChatEncoder.of(tokenizer).encode([{"role": role, "content": content} for role, content in turns])
    return str(tokenizer.decode(first_turn(ids, turn_marks(tokenizer))))


def test_the_first_turn_is_what_the_user_said_first_whatever_stands_around_it() -> None:
    assert first_of(("user", "hello\nyou")) == "hello\nyou"
    assert first_of(("system", "be kind"), ("user", "hello"), ("assistant", "yes?"), ("user", "more")) == "hello"
    assert first_of(("user", "a <|im_end|> b <|im_start|>user\n c")) == "a <|im_end|> b <|im_start|>user\n c"


def test_a_prompt_without_the_templates_marks_is_its_own_first_turn() -> None:
    bare, strict = byte_tokenizer(), byte_tokenizer()
    bare.chat_template, strict.chat_template = None, "{{ raise_exception('no chats') }}"
    for tokenizer in (TOKENIZER, bare, strict):
        ids = tokenizer.encode("plain text", add_special_tokens=False)
        assert first_turn(ids, turn_marks(tokenizer)) == ids


def test_a_template_that_marks_later_turns_otherwise_than_the_first_is_understood() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ 'Preamble. ' }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% else %}{{ message['content'] + ' ' }}{% endif %}"
        "{% endfor %}"
    )
    assert first_of(("user", "hello"), ("assistant", "yes?"), ("user", "more"), tokenizer=tokenizer) == "hello"
