import pytest

from models.throughput.speeds import MAX_DOMAINS, Part, Speeds


def test_a_request_that_emits_two_tokens_a_step_is_as_fast_as_its_steps_allow() -> None:
    speeds = Speeds()
    for _ in range(10):
        speeds.see({"code": Part(2, 4), "chat": Part(1, 1)}, step_ms=15.0, plain_ms=10.0)
    assert speeds.of("code") == pytest.approx((2000 / 15, 100.0))
    assert speeds.of("chat") == pytest.approx((1000 / 15, 100.0))
    assert speeds.of("math") is None


def test_what_was_long_ago_counts_no_more() -> None:
    speeds = Speeds()
    for step_ms in (50.0, 10.0):
        for _ in range(8000):
            speeds.see({"code": Part(1, 1)}, step_ms, plain_ms=10.0)
    speed = speeds.of("code")
    assert speed is not None
    assert speed.tokens_per_s == pytest.approx(100.0, rel=0.01)


def test_names_that_clients_make_up_are_one_domain() -> None:
    speeds = Speeds()
    for number in range(1000):
        speeds.see({f"domain-{number}": Part(1, 1)}, 10.0, 10.0)
    assert len(speeds._sums) <= MAX_DOMAINS + 1
    assert speeds.of("domain-999") == pytest.approx((100.0, 100.0))
