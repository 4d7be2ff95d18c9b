"""Prometheus metrics: the engine's gauges as they are, and every request's life. Own registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily

from octavo.core.request import FinishReason
from octavo.engine.report import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)


class Metrics:
    """Implements `octavo.engine.stream.Observer`. ``stats`` is asked at every scrape."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self._stats = stats

        def gauge(name: str, text: str, value: Callable[[EngineStats], float]) -> None:
            Gauge(name, text, registry=self.registry).set_function(lambda: value(stats()))

        gauge(
            "octavo_num_requests_running",
            "Requests that own a place in the batch",
            lambda s: s.num_running,
        )
        gauge(
            "octavo_num_requests_waiting", "Requests that wait for a place", lambda s: s.num_waiting
        )
        gauge(
            "octavo_kv_cache_usage_perc",
            "Share of the KV cache's blocks in use, 0 to 1",
            lambda s: s.kv_cache_usage,
        )
        self.registry.register(self)
        self._prompt_tokens = Counter(
            "octavo_prompt_tokens", "Prompt tokens computed", registry=self.registry
        )
        self._generation_tokens = Counter(
            "octavo_generation_tokens", "Tokens generated", registry=self.registry
        )
        self._ends = Counter(
            "octavo_request_success",
            "Requests that ended, by reason",
            ("finished_reason",),
            registry=self.registry,
        )
        for reason in FinishReason:
            self._ends.labels(reason.value)
        self._first_token = Histogram(
            "octavo_time_to_first_token_seconds",
            "From submission to the first token",
            buckets=_FIRST_TOKEN_S,
            registry=self.registry,
        )
        self._between = Histogram(
            "octavo_inter_token_latency_seconds",
            "Between a request's tokens",
            buckets=_BETWEEN_S,
            registry=self.registry,
        )
        self._whole = Histogram(
            "octavo_e2e_request_latency_seconds",
            "From submission to the end of a request",
            buckets=_WHOLE_S,
            registry=self.registry,
        )

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Counters that live in the engine."""
        stats = self._stats()
        yield CounterMetricFamily(
            "octavo_num_preemptions",
            "Sequences that lost their blocks and were recomputed",
            value=stats.num_preemptions,
        )
        yield CounterMetricFamily(
            "octavo_engine_steps", "Steps of the engine", value=stats.num_steps
        )

    def on_first_token(self, num_prompt_tokens: int, latency_s: float) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        self._first_token.observe(latency_s)

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None:
            for _ in range(num_tokens):
                self._between.observe(gap_s / num_tokens)

    def on_end(self, reason: FinishReason, latency_s: float) -> None:
        self._ends.labels(reason.value).inc()
        self._whole.observe(latency_s)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)
