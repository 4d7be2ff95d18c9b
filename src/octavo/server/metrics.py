"""Prometheus metrics: the engine's gauges as they are, and every request's life. Own registry.

Names and meanings are vLLM's, with ``octavo_`` for ``vllm:``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from octavo import __version__
from octavo.core.request import FinishReason
from octavo.engine.client import AsyncEngine
from octavo.engine.report import EngineStats
from octavo.engine.stream import RequestLife

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 5)
_WHOLE_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_PART_S = (0.001, 0.005, 0.01, *_WHOLE_S)
_CHOICES = (1, 2, 5, 10, 20, 50, 100)

# A gauge for each creation time would double the page.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Implements `octavo.engine.stream.Observer` for ``engine``, which is asked at every scrape.

    Of a dead engine there are no gauges, as the last values would pass for the present ones;
    counters keep theirs.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        ProcessCollector(namespace="octavo_engine", pid=self._engine_pid, registry=self.registry)
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens, those from the prefix cache included"
        )
        self._cache_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache; none without one"
        )
        self._cache_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens that came from the prefix cache"
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated")
        self._ends = Counter(
            "octavo_request_success",
            "Requests that ended, by reason",
            ("finished_reason",),
            registry=self.registry,
        )
        for reason in FinishReason:
            self._ends.labels(reason.value)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token", _FIRST_TOKEN_S
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between a request's tokens", _BETWEEN_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time between its tokens",
            _BETWEEN_S,
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end of a request", _WHOLE_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From submission to the first step that runs it", _PART_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token", _PART_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first to the last token", _PART_S
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the end", _PART_S
        )
        sizes = _sizes(engine.report.max_model_len)
        self._request_prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request", sizes
        )
        self._request_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request", sizes
        )
        self._request_max = self._histogram(
            "request_params_max_tokens", "Tokens that a request may generate", sizes
        )
        self._choices = self._histogram(
            "request_params_n", "Choices that a request asks for", _CHOICES
        )

    def collect(self) -> Iterator[Metric]:
        """What lives in the engine."""
        stats = self._engine.stats
        is_up = self._engine.error is None
        yield GaugeMetricFamily(
            "octavo_engine_up", "Whether the engine process lives, 1 or 0", value=is_up
        )
        if is_up:
            yield from self._gauges(stats)
        yield GaugeMetricFamily(
            "octavo_front_end_tasks", "Asyncio tasks of the front end", value=_num_tasks()
        )
        yield CounterMetricFamily(
            "octavo_num_preemptions",
            "Requests that lost their blocks for a while",
            value=stats.num_preemptions,
        )
        ways = CounterMetricFamily(
            "octavo_preemptions_by_way",
            "Preempted requests, by the way they get their keys and values back",
            labels=["way"],
        )
        ways.add_metric(["recompute"], stats.num_preemptions - stats.num_swaps)
        ways.add_metric(["swap"], stats.num_swaps)
        yield ways
        yield CounterMetricFamily(
            "octavo_engine_steps", "Steps of the engine", value=stats.num_steps
        )

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        gauges: tuple[tuple[str, str, float], ...] = (
            ("num_requests_running", "Sequences that own a place in the batch", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for a place", stats.num_waiting),
            (
                "kv_cache_usage_perc",
                "Share of the KV cache's blocks in use, 0 to 1",
                stats.kv_cache_usage,
            ),
            (
                "num_pinned_blocks",
                "KV cache blocks that registered prefixes keep; they count as in use",
                stats.num_pinned_blocks,
            ),
            (
                "num_kv_blocks",
                "KV cache blocks that sequences can own; none while the engine is asleep",
                stats.num_usable_blocks,
            ),
            ("is_sleeping", "Whether the KV cache's memory was given back", stats.is_asleep),
            (
                "num_requests_outstanding",
                "Requests that the front end has not answered in full, each of n choices counted",
                self._engine.num_outstanding,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"octavo_{name}", text, value=value)
        yield self._info()
        yield from self._device_memory(stats)

    def _device_memory(self, stats: EngineStats) -> Iterator[Metric]:
        memory = self._engine.report.memory
        if memory is None:
            return
        yield GaugeMetricFamily(
            "octavo_gpu_memory_total_bytes", "The GPU's memory", value=memory.total_bytes
        )
        parts = GaugeMetricFamily(
            "octavo_gpu_memory_bytes",
            "How it was shared out at the start; the parts sum to the total",
            labels=["part"],
        )
        for name, value in memory.parts().items():
            parts.add_metric([name.lower().replace(" ", "_")], value)
        yield parts
        yield GaugeMetricFamily(
            "octavo_gpu_graph_bytes",
            "What captured steps have taken so far of the part graphs",
            value=stats.captured_bytes,
        )

    def on_choices(self, n: int) -> None:
        """A request of ``n`` choices for each prompt was taken in."""
        self._choices.observe(n)

    def on_first_token(
        self, num_prompt_tokens: int, num_cached_tokens: int, latency_s: float
    ) -> None:
        self._prompt_tokens.inc(num_prompt_tokens)
        if self._engine.report.prefix_caching:
            self._cache_queries.inc(num_prompt_tokens)
            self._cache_hits.inc(num_cached_tokens)
        self._first_token.observe(latency_s)

    def on_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None:
            for _ in range(num_tokens):
                self._between.observe(gap_s / num_tokens)

    def on_end(self, reason: FinishReason, life: RequestLife) -> None:
        self._ends.labels(reason.value).inc()
        self._whole.observe(life.whole_s)
        self._request_prompt.observe(life.num_prompt_tokens)
        self._request_tokens.observe(life.num_tokens)
        self._request_max.observe(life.max_tokens)
        if life.queue_s is not None:
            self._queue.observe(life.queue_s)
            self._inference.observe(max(0.0, life.whole_s - life.queue_s))
        if life.prefill_s is not None:
            self._prefill.observe(life.prefill_s)
        if life.decode_s is not None:
            self._decode.observe(life.decode_s)
            if life.num_tokens > 1:
                self._per_token.observe(life.decode_s / (life.num_tokens - 1))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"octavo_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"octavo_{name}", text, buckets=buckets, registry=self.registry)

    def _engine_pid(self) -> int:
        """0, of which nothing is told, once it is dead: its number may be another process's."""
        return 0 if self._engine.error is not None else self._engine.pid or 0

    def _info(self) -> Metric:
        report = self._engine.report
        labels = {
            "version": __version__,
            "block_size": str(report.capacity.block_size),
            "num_blocks": str(report.capacity.num_blocks - 1),
            "num_tokens": str(report.num_kv_tokens),
            "num_bytes": str(report.kv_bytes),
            "weight_bytes": str(report.weight_bytes),
            "workspace_bytes": str(report.workspace_bytes),
        }
        info = GaugeMetricFamily(
            "octavo_cache_config_info",
            "The KV cache's shape and where memory went, as labels",
            labels=list(labels),
        )
        info.add_metric(list(labels.values()), 1)
        return info


def _sizes(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to ``largest``."""
    steps = [digit * 10**power for power in range(9) for digit in (1, 2, 5)]
    return tuple(float(step) for step in steps if step <= largest)


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # asked outside a loop
        return 0
