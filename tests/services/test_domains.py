from infra.consent import OTHER_DOMAINS
from services.domains import Domains


def test_a_keys_made_up_domains_hide_nobody_elses() -> None:
    domains = Domains(max_per_key=2)
    assert [domains.admit("flooder", f"junk-{number}") for number in range(64)] == ["junk-0", "junk-1"] + [
        OTHER_DOMAINS
    ] * 62
    assert domains.admit("flooder", "junk-1") == "junk-1"
    assert domains.admit("other", "code") == domains.admit(None, "code") == "code"
    assert domains.admit("other", "junk-2") == "junk-2"
    assert domains.admit("flooder", "code") == OTHER_DOMAINS


def test_a_request_that_names_none_never_counts() -> None:
    domains = Domains(max_per_key=0)
    assert [domains.admit("k", name) for name in ("default", "other", "chat")] == ["default", "other", "other"]
