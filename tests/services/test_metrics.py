from services.metrics import render
from tests.infra.statuses import STATUS


def test_the_text_holds_the_service_figures_by_label() -> None:
    lines = render(STATUS).decode().splitlines()
    for line in (
        'redraft_requests_total{status="429"} 1.0',
        'redraft_reconciler_events_total{event="swaps"} 2.0',
        'redraft_mean_accepted_length{domain="chat"} 1.75',
        'redraft_context_mean_accepted_length{context="2048"} 1.75',
        "redraft_longest_context_tokens 1500.0",
        'redraft_draft_tokens{why="pays"} 1.0',
        'redraft_expected_tokens_per_second{drafting="planned"} 120.0',
        'redraft_request_tokens_per_second{domain="chat",drafting="planned"} 75.0',
        'redraft_request_tokens_per_second{domain="chat",drafting="none"} 50.0',
        "redraft_log_dropped_total 1.0",
        "redraft_tokens_total 99.0",
        'redraft_accepted_tokens_total{source="head"} 30.0',
        'redraft_accepted_tokens_total{source="lookup"} 12.0',
        "redraft_speculating 1.0",
        "redraft_draft_version 0.0",
        "redraft_champion 4.0",
    ):
        assert line in lines


def test_of_several_replicas_each_figure_names_its_own() -> None:
    lines = render(STATUS.model_copy(update={"replica": "host:8000/a"})).decode().splitlines()
    assert 'redraft_champion{replica="host:8000/a"} 4.0' in lines
    assert 'redraft_requests_total{replica="host:8000/a",status="429"} 1.0' in lines
