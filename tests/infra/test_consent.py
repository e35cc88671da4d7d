import pytest

from infra import consent
from infra.consent import QueryRow, consent_level, group_of, parse_domain, redact, require_loggable, row_of
from models import recipe
from tests.infra.rows import row

SAMPLING = {"temperature": 0.5, "top_k": 3, "stop": ["secret"], "guided": "secret", "seed": None}
DRAFTED = {"drafted": [2, 0], "accepted": [1, 0], "drafted_ids": [[3, 4], []], "draft_version": 2, "speculating": True}
SAID = {"prompt": "hello", "completion": "world", "prompt_ids": [1, 2], "completion_ids": [3], "sampling": SAMPLING}
ROW = QueryRow(**row("a1").model_dump() | SAID | DRAFTED | {"first_token_ms": 3.5})


def row_with(**change: object) -> QueryRow:
    return QueryRow(**ROW.model_dump() | change)


@pytest.mark.parametrize(
    ("header", "store", "policy", "wanted"),
    [
        (None, None, None, "metadata"),
        (None, True, None, "full"),
        ("metadata", True, "full", "metadata"),
        ("full", True, "none", "none"),
        ("FULL", None, None, "none"),
        ("", None, None, "none"),
        ("full\n", True, None, "none"),
        (3, None, None, "none"),
        (None, "false", None, "none"),
        (None, 1, None, "none"),
        (None, True, ["full"], "none"),
    ],
)
def test_the_stricter_wins_and_malformed_means_none(header: str, store: bool, policy: str, wanted: str) -> None:
    assert consent_level(header, store, policy) == wanted


def test_metadata_keeps_counts_and_numbers_and_no_text_or_ids() -> None:
    kept = redact(row_with(group="0" * 64), "metadata")
    assert kept is not None
    assert "secret" not in kept.model_dump_json()
    assert (kept.prompt, kept.completion, kept.prompt_ids, kept.completion_ids, kept.drafted_ids) == (None,) * 5
    assert kept.group is None
    assert (kept.consent, kept.drafted, kept.accepted) == ("metadata", [2, 0], [1, 0])
    assert kept.sampling == {"temperature": 0.5, "top_k": 3}
    require_loggable(kept)


def test_a_row_is_refused_when_its_consent_does_not_allow_what_it_holds() -> None:
    with pytest.raises(ValueError, match="consent 'none'"):
        require_loggable(ROW.model_copy(update={"consent": "none"}))
    with pytest.raises(ValueError, match=r"holds prompt, .*drafted_ids, sampling.stop, sampling.guided"):
        require_loggable(ROW.model_copy(update={"consent": "metadata"}))
    with pytest.raises(ValueError, match="the log gives it"):
        require_loggable(ROW.model_copy(update={"seq": 1}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [3, 0]}, "does not fit"),
        ({"accepted": [1]}, "does not fit"),
        ({"accepted": None}, "come together"),
        ({"drafted_ids": [[3], []]}, "drafted_ids has steps"),
        ({"prompt": "\ud800"}, "surrogates"),
        ({"sampling": {"stop": "\ud800"}}, "surrogates"),
        ({"sampling": {"temperature": float("nan")}}, "not JSON compliant"),
        ({"first_token_ms": float("inf")}, "finite"),
        ({"domain": "what a person wrote"}, "pattern"),
        ({"id": "a\r\nb"}, "pattern"),
        ({"group": "stdlib:json"}, "pattern"),
        ({"colour": 1}, "Extra inputs"),
    ],
)
def test_a_row_that_contradicts_itself_or_cannot_be_stored_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_with(**change)


def test_requests_rows_and_recipes_name_domains_by_the_same_words() -> None:
    assert recipe.DOMAIN == consent.DOMAIN  # infra and models may not import each other
    assert row_with(domain=parse_domain("text-to_sql2")).domain == "text-to_sql2"
    assert row_with(domain=parse_domain(None)).domain == "default"


def test_a_group_is_a_hash_that_differs_by_name_by_key_and_by_home() -> None:
    names, keys, secrets = ("a", "stdlib:json"), (None, "k1", "k2"), (b"s" * 32, b"t" * 32)
    found = [group_of(secret, key, name) for secret in secrets for key in keys for name in names]
    assert len(set(found)) == 12
    assert found[0] == group_of(b"s" * 32, None, "a")
    assert group_of(b"s" * 32, "k1", None) is None
    assert [row_with(group=one).group for one in found] == found


@pytest.mark.parametrize("named", ["", "a secret", "a\n", "secr\u00e9t", "secret" * 22, b"secret", 7])
def test_what_is_no_group_is_refused_by_request_and_row_alike_without_repeating_it(named: object) -> None:
    with pytest.raises(ValueError, match="1 to 128 printable ASCII characters without a space, got") as caught:
        group_of(b"s" * 32, None, named)
    assert "secr" not in str(caught.value)
    with pytest.raises(ValueError, match="group"):
        row_with(group=named)


@pytest.mark.parametrize("named", ["", "Chat", "a.b", "a" * 33, "a\n", "my secret", 7])
def test_what_is_no_domain_is_refused_by_request_and_row_alike_and_no_row_repeats_it(named: object) -> None:
    with pytest.raises(ValueError, match="wanted 1 to 32 of a-z"):
        parse_domain(named)
    with pytest.raises(ValueError, match="domain") as caught:
        row_with(domain=named)
    assert "secret" not in str(caught.value)


def test_an_answer_given_again_is_named_by_its_row() -> None:
    assert [row_of(name) for name in ("chatcmpl-1", f"chatcmpl-1{consent.AGAIN}")] == ["chatcmpl-1"] * 2
