"""Prometheus text: the service's own figures, then everything that vLLM keeps in this process."""

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from infra.status import ServiceStatus


class StatusCollector(Collector):
    """Turns one status into metrics."""

    def __init__(self, status: ServiceStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        requests = CounterMetricFamily("redraft_requests", "Answers by HTTP status.", labels=["status"])
        for code, number in status.requests.items():
            requests.add_metric([code], number)
        yield requests
        events = CounterMetricFamily(
            "redraft_reconciler_events", "How often the loop that swaps drafts did what.", labels=["event"]
        )
        for event, number in status.reconciler.items():
            events.add_metric([event], number)
        yield events
        tau = GaugeMetricFamily(
            "redraft_mean_accepted_length",
            "τ over the last 64 requests of a domain that the draft drafted alone, 1 is no gain.",
            labels=["domain"],
        )
        for domain, figures in status.acceptance.items():
            tau.add_metric([domain], figures.mean_accepted_length)
        yield tau
        coverage = GaugeMetricFamily(
            "redraft_vocabulary_coverage",
            "Share of the last 64 answers' tokens that the draft's vocabulary has, by domain.",
            labels=["domain"],
        )
        for domain, share in status.coverage.items():
            coverage.add_metric([domain], share)
        yield coverage
        yield CounterMetricFamily("redraft_log_written", "Rows written to the query log.", value=status.log.written)
        yield CounterMetricFamily(
            "redraft_log_dropped", "Rows that did not reach the query log.", value=status.log.dropped
        )
        captured = CounterMetricFamily(
            "redraft_captured", "Requests whose hidden states were wanted, by what became of them.", labels=["outcome"]
        )
        for outcome, number in status.captured.items():
            captured.add_metric([outcome], number)
        yield captured
        yield CounterMetricFamily("redraft_tokens", "Completion tokens served.", value=status.tokens)
        accepted = CounterMetricFamily(
            "redraft_accepted_tokens",
            "Completion tokens that were drafted, by the draft itself or looked up in earlier text; under a source of "
            "their own where a grammar constrained the answer.",
            labels=["source"],
        )
        for source, number in status.accepted.items():
            accepted.add_metric([source], number)
        yield accepted
        yield CounterMetricFamily(
            "redraft_seeded_answers", "Answers to a seed and a temperature, begun without drafts.", value=status.seeded
        )
        yield GaugeMetricFamily("redraft_in_flight", "Requests being answered.", value=status.in_flight)
        yield GaugeMetricFamily("redraft_speculating", "1 while the draft is used.", value=float(status.speculating))
        if status.throughput is not None:
            throughput = GaugeMetricFamily(
                "redraft_expected_tokens_per_second",
                "Expected of all running requests, as they are drafted and without any draft.",
                labels=["drafting"],
            )
            throughput.add_metric(["planned"], status.throughput.tokens_per_s)
            throughput.add_metric(["none"], status.throughput.plain_tokens_per_s)
            yield throughput
            drafted = GaugeMetricFamily(
                "redraft_draft_tokens", "Tokens that the draft drafts in a step, by why so many.", labels=["why"]
            )
            drafted.add_metric([status.throughput.why], status.throughput.num_draft_tokens)
            yield drafted
        speed = GaugeMetricFamily(
            "redraft_request_tokens_per_second",
            "Of one request, measured from the times of steps: as it is drafted, and without any draft.",
            labels=["domain", "drafting"],
        )
        for domain, measured in status.speed.items():
            speed.add_metric([domain, "planned"], measured.tokens_per_s)
            speed.add_metric([domain, "none"], measured.plain_tokens_per_s)
        yield speed
        yield GaugeMetricFamily(
            "redraft_fault",
            "1 while the canary prompts show a broken draft or engine.",
            value=float(bool(status.fault)),
        )
        yield GaugeMetricFamily("redraft_draft_version", "Served draft, 0 if none.", value=status.draft_version or 0)
        yield GaugeMetricFamily("redraft_champion", "The registry's draft, 0 if none.", value=status.champion or 0)
        yield GaugeMetricFamily("redraft_uptime_seconds", "Seconds since the start.", value=status.uptime_s)


def render(status: ServiceStatus) -> bytes:
    """Return the text of /metrics for one status."""
    own = CollectorRegistry(auto_describe=False)
    own.register(StatusCollector(status))
    return generate_latest(own) + generate_latest(REGISTRY)
