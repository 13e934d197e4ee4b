"""Metrics in the Prometheus format: counters of this process, and gauges from the database about all processes.

The database is queried during a scrape, and seldom: a result is used for at least two seconds, and for fifty times as
long as the query took (at most fifteen seconds), so that frequent scrapes occupy a connection for little of the time.
While the database is unavailable, the metrics of the process itself are still served.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import prometheus_client
import psycopg
import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from starlette.types import Scope

from ecluse.access.edge import Edge
from ecluse.api.job_gauges import GAUGES
from ecluse.base.version import commit, release
from ecluse.db.connect import Pool
from ecluse.db.query import fetch_rows
from ecluse.engine.kit import Kit
from ecluse.engine.model import counters
from ecluse.flow import Gauge
from ecluse.flows.enrichment import metrics as enrichment
from ecluse.flows.jobs import states as jobs
from ecluse.flows.pricing import metrics as pricing
from ecluse.insight import run_queries
from ecluse.insight.samples import Sample
from ecluse.realtime.hub import Hub

log = structlog.get_logger(__name__)
# Without this, each counter and histogram would have a second series, `_created`, that is not used.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

KEEP_SECONDS = (2.0, 15.0)  # at least, at most
KEEP_TIMES = 50
PATIENCE_SECONDS = 2.0
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
FAMILIES: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

# From the database: the same from every replica.
SHARED = {
    "runs_open": (["flow", "state"], "Runs that have not ended."),
    "items_waiting": (["lane"], "Items that no worker has claimed, due or not yet."),
    "lane_held": (["lane"], "1 while nothing of the lane is started: held at a vendor's request, or paused."),
    "lane_down": (["lane"], "1 from the opening of the lane's breaker until a call is answered again."),
    "lane_in_flight": (["lane"], "Items that a worker has claimed."),
    "outbox_unpublished": ([], "Events written and not yet published."),
    "outbox_oldest_seconds": ([], "Age of the oldest event that is not published; 0 without any."),
    "replicas": (["state"], "Processes by state; ended ones are left out after an hour."),
    "schedules_overdue": ([], "Schedules with a due instant more than a minute ago that is not decided."),
}
# Counters of this process since it started.
OWN: dict[str, tuple[list[str], str, Mapping[Any, float]]] = {
    "runs_ended": (["flow", "state"], "Runs that this process ended.", counters.runs_ended),
    "items_finished": (["flow", "stage", "status"], "Items whose end this process stored.", counters.items_finished),
    "vendor_errors": (["flow", "stage", "code"], "Calls that a vendor refused or lost.", counters.vendor_errors),
    "calls": (["flow", "stage"], "Executions of items, whatever came of them.", counters.calls),
    "call_seconds": (
        ["flow", "stage"],
        "Their total duration; divided by `calls`, the latency.",
        counters.call_seconds,
    ),
    "schedule_fires": (["flow", "result"], "Decisions of this process on the latest due time.", counters.fires),
    "schedule_fire_lag_seconds": (["flow"], "From due time to fire, summed.", counters.fire_lag_seconds),
    "job_leases_lost": (["tenant"], "Attempts at jobs whose lease ran out.", jobs.leases_lost),
    "gate_looks": (["flow", "stage"], "Reads of the progress of a stage by its gate.", counters.gate_looks),
    "enrichment_requests": (
        ["trigger", "result"],
        "Requests for companies by result: answered from stored data (cached), attached to an open job, or a new job.",
        enrichment.requests,
    ),
    "enrichment_jobs_ended": (["status"], "Jobs of company enrichment that this process ended.", enrichment.jobs),
    "spend": (["vendor", "model"], "Cost of the paid calls whose end this process stored.", counters.spent),
}


class Metrics:
    """The metrics of a server, as a collector of prometheus_client. `kit`, `hub` and `pool` are None until the engine
    runs."""

    def __init__(self, edge: Edge, gauges: Sequence[Gauge] = ()) -> None:
        self._edge = edge
        self._gauges = [*GAUGES, *(Gauge(*one) for one in enrichment.GAUGES), *gauges]
        self._of_flows: dict[str, list[tuple[list[str], float]]] = {}
        self._samples: list[Sample] = []
        self.kit: Kit | None = None
        self.hub: Hub | None = None
        self.pool: Pool | None = None
        self._registry = CollectorRegistry()
        for collector in (
            prometheus_client.ProcessCollector,
            prometheus_client.PlatformCollector,
            prometheus_client.GCCollector,
        ):
            collector(registry=self._registry)
        self._registry.register(self)
        names = ["route", "method", "status"]
        self._requests = Counter("ecluse_http_requests", "Requests answered.", names, registry=self._registry)
        self._durations = Histogram(
            "ecluse_http_request_duration_seconds",
            "From the first byte of a request to the last of its answer.",
            ["route", "method"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        build = prometheus_client.Gauge(
            "ecluse_build_info", "Version and commit of this program.", ["version", "commit"], registry=self._registry
        )
        build.labels(release(), commit() or "").set(1)
        self._shared: list[dict[str, Any]] | None = None
        self._good_until = 0.0
        self._asking = asyncio.Lock()

    async def text(self) -> bytes:
        async with self._asking:  # concurrent scrapes share one query
            if time.monotonic() >= self._good_until:
                await self._ask()
        return prometheus_client.generate_latest(self._registry)

    async def _ask(self) -> None:
        began, self._shared = time.monotonic(), None
        if self.pool is not None:
            try:
                async with asyncio.timeout(PATIENCE_SECONDS), self.pool.connection() as connection:
                    self._of_flows = {one.name: await fetch_rows(connection, one.sql) for one in self._gauges}
                    self._samples = pricing.samples(await pricing.read(connection))
                    self._shared = await run_queries.vitals(connection)
            except (psycopg.Error, TimeoutError) as error:
                log.warning("metrics: database unavailable", error=str(error).strip() or "no answer in time")
        now, (least, most) = time.monotonic(), KEEP_SECONDS
        self._good_until = now + (min(most, max(least, KEEP_TIMES * (now - began))) if self._shared else least)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "ecluse_database_up", "1 if the database answered the last query for metrics.", self._shared is not None
        )
        if self._shared is not None:
            for name, (labels, meaning) in SHARED.items():
                family = GaugeMetricFamily(f"ecluse_{name}", meaning, labels=labels)
                for row in self._shared:
                    if row["what"] == name:
                        family.add_metric(row["labels"], row["value"])
                yield family
            for gauge in self._gauges:
                family = GaugeMetricFamily(f"ecluse_{gauge.name}", gauge.meaning, labels=gauge.labels)
                for values, value in self._of_flows[gauge.name]:
                    family.add_metric(values, value)
                yield family
            yield from families(self._samples)
        for name, (labels, meaning, counted) in OWN.items():
            counter = CounterMetricFamily(f"ecluse_{name}", meaning, labels=labels)
            for values, count in counted.items():
                counter.add_metric([str(value) for value in values], count)
            yield counter
        slots = self.kit.worker.slots if self.kit is not None and self.kit.worker is not None else None
        yield GaugeMetricFamily(
            "ecluse_hands", "Maximum number of calls of this process in flight.", slots.count if slots else 0
        )
        yield GaugeMetricFamily("ecluse_hands_busy", "Calls of this process in flight.", slots.busy if slots else 0)
        yield GaugeMetricFamily("ecluse_http_connections", "Open connections of clients.", self._edge.connections)
        yield CounterMetricFamily(
            "ecluse_http_connections_turned_away",
            "Connections closed without a request, or refused, at the limit.",
            self._edge.turned_away,
        )
        if self.hub is not None:
            yield from realtime_metrics(self.hub)

    def answered(self, scope: Scope, status: int, seconds: float) -> None:
        """Count a request and its duration under the pattern of its route, not under its path: ids in labels would make
        the number of series unbounded."""
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._requests.labels(route, method, status).inc()
        self._durations.labels(route, method).observe(seconds)


def families(samples: Sequence[Sample]) -> Iterator[Metric]:
    """Yield the samples of flows as metrics for Prometheus, grouped by name."""
    by_name = defaultdict[str, list[Sample]](list)
    for one in samples:
        by_name[one.metric.name].append(one)
    for several in by_name.values():
        metric, labels = several[0].metric, list(several[0].labels)
        family = FAMILIES[metric.type](f"ecluse_{metric.name.replace('.', '_')}", metric.meaning, labels=labels)
        for one in several:
            if isinstance(family, HistogramMetricFamily):
                buckets = [*(one.buckets or {}).items(), ("+Inf", one.value or 0)]
                family.add_metric(list(one.labels.values()), buckets, one.sum)
            elif one.value is not None:
                family.add_metric(list(one.labels.values()), one.value)
        yield family


def realtime_metrics(hub: Hub) -> Iterator[Metric]:
    here = GaugeMetricFamily(
        "ecluse_realtime_connections", "Realtime connections to this process.", labels=["transport"]
    )
    for transport in ("websocket", "sse"):
        here.add_metric([transport], hub.connections()[transport])
    yield here
    for name, label, meaning, counted in (
        ("delivered", "transport", "Events queued for a listener.", hub.delivered),
        ("dropped", "reason", "Events that were dropped instead of being sent to a listener.", hub.dropped),
    ):
        counter = CounterMetricFamily(f"ecluse_realtime_events_{name}", meaning, labels=[label])
        for value, count in counted.items():
            counter.add_metric([value], count)
        yield counter
