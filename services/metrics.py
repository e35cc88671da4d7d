"""Prometheus text: the service's own figures, then everything that vLLM keeps in this process."""

from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.core import CounterMetricFamily as Counter
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from infra.status import ServiceStatus


class StatusCollector(Collector):
    def __init__(self, status: ServiceStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield each figure, of several replicas with the one that it is of: a scrape through a proxy reaches any."""
        own = {"replica": self._status.replica} if self._status.replica else {}
        for metric in self._figures():
            metric.samples = [one._replace(labels={**one.labels, **own}) for one in metric.samples]
            yield metric

    def _figures(self) -> Iterator[Metric]:
        status = self._status
        yield _labelled(Counter("redraft_requests", "Answers by HTTP status.", labels=["status"]), status.requests)
        told = "How often the loop that swaps drafts did what."
        yield _labelled(Counter("redraft_reconciler_events", told, labels=["event"]), status.reconciler)
        told = "τ over the last 64 requests of a domain that the draft drafted alone, 1 is no gain."
        taus = {domain: figures.mean_accepted_length for domain, figures in status.acceptance.items()}
        yield _labelled(Gauge("redraft_mean_accepted_length", told, labels=["domain"]), taus)
        told = "τ over the last 64 requests of up to so many tokens, prompt and answer, that the draft drafted alone."
        taus = {length: figures.mean_accepted_length for length, figures in status.acceptance_by_context.items()}
        yield _labelled(Gauge("redraft_context_mean_accepted_length", told, labels=["context"]), taus)
        told = "Tokens of the longest of the last 256 requests, prompt and answer."
        yield Gauge("redraft_longest_context_tokens", told, value=status.longest_context)
        told = "Share of the last 64 answers' tokens that the draft's vocabulary has, by domain."
        yield _labelled(Gauge("redraft_vocabulary_coverage", told, labels=["domain"]), status.coverage)
        yield Counter("redraft_log_written", "Rows written to the query log.", value=status.log.written)
        yield Counter("redraft_log_dropped", "Rows that did not reach the query log.", value=status.log.dropped)
        told = "Requests whose hidden states were wanted, by what became of them."
        yield _labelled(Counter("redraft_captured", told, labels=["outcome"]), status.captured)
        yield Counter("redraft_tokens", "Completion tokens served.", value=status.tokens)
        told = "Completion tokens that were drafted, by the draft itself or looked up in earlier text; "
        told += "under a source of their own where a grammar constrained the answer."
        yield _labelled(Counter("redraft_accepted_tokens", told, labels=["source"]), status.accepted)
        told = "Answers to a seed and a temperature, begun without drafts."
        yield Counter("redraft_seeded_answers", told, value=status.seeded)
        yield Gauge("redraft_in_flight", "Requests being answered.", value=status.in_flight)
        yield Gauge("redraft_speculating", "1 while the draft is used.", value=float(status.speculating))
        if (plan := status.throughput) is not None:
            told = "Expected of all running requests, as they are drafted and without any draft."
            tokens_per_s = {"planned": plan.tokens_per_s, "none": plan.plain_tokens_per_s}
            yield _labelled(Gauge("redraft_expected_tokens_per_second", told, labels=["drafting"]), tokens_per_s)
            told = "Tokens that the draft drafts in a step, by why so many."
            yield _labelled(Gauge("redraft_draft_tokens", told, labels=["why"]), {plan.why: plan.num_draft_tokens})
        told = "Of one request, measured from the times of steps: as it is drafted, and without any draft."
        speed = Gauge("redraft_request_tokens_per_second", told, labels=["domain", "drafting"])
        for domain, measured in status.speed.items():
            speed.add_metric([domain, "planned"], measured.tokens_per_s)
            speed.add_metric([domain, "none"], measured.plain_tokens_per_s)
        yield speed
        told = "1 while the canary prompts show a broken draft or engine."
        yield Gauge("redraft_fault", told, value=float(bool(status.fault)))
        yield Gauge("redraft_draft_version", "Served draft, 0 if none.", value=status.draft_version or 0)
        yield Gauge("redraft_champion", "The registry's draft, 0 if none.", value=status.champion or 0)
        yield Gauge("redraft_uptime_seconds", "Seconds since the start.", value=status.uptime_s)


def _labelled(metric: Counter | Gauge, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        metric.add_metric([label], value)
    return metric


def render(status: ServiceStatus) -> bytes:
    """Return the text of /metrics for one status."""
    return generate_latest(StatusCollector(status)) + generate_latest(REGISTRY)
