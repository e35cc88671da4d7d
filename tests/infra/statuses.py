"""What a service may say of itself."""

from infra.events import EventCounts
from infra.status import LogCounts, Phase, Proof, RecentAcceptance, ServiceStatus
from models.types import Speed, ThroughputEstimate

STATUS = ServiceStatus(
    replica="",
    phase=Phase.SERVING,
    champion=4,
    draft_version=None,
    speculating=True,
    throughput=ThroughputEstimate(num_draft_tokens=1, why="pays", tokens_per_s=120.0, plain_tokens_per_s=80.0),
    speed={"chat": Speed(tokens_per_s=75.0, plain_tokens_per_s=50.0, low=1.4, high=1.6, drafted=0.9)},
    mode="compiled: compiled steps are faster",
    unplanned=None,
    fallback=None,
    fault=None,
    replacement=None,
    swaps=2,
    swap_ms=31.5,
    proof=None,
    refused={"2-0123456789ab": "fc.weight holds NaN"},
    postponed={"4-0123456789ab": "attempt 1 failed"},
    reconciler={"swaps": 2},
    acceptance={"chat": RecentAcceptance(requests=9, acceptance_rate=0.25, mean_accepted_length=1.75)},
    acceptance_by_context={"2048": RecentAcceptance(requests=9, acceptance_rate=0.25, mean_accepted_length=1.75)},
    longest_context=1500,
    coverage={"chat": 0.875},
    log=LogCounts(written=5, dropped=1, unlogged=0, last_error=None),
    captured={"written": 4, "not wanted": 1},
    events=EventCounts(sent=0, dropped=0, last_error=None),
    tokens=99,
    accepted={"head": 30, "lookup": 12, "structured": 3},
    seeded=6,
    requests={"200": 7, "429": 1},
    in_flight=3,
    target_version=1,
    served_name="target",
    uptime_s=1.5,
)
PROOF = Proof(weight_error=0.0, num_near_ties=0, tau=1.5, promised_tau=1.6)
