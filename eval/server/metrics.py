"""What Prometheus reads of a server: counters and histograms fed from the engine's own telemetry records."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eval.engine import Engine
from eval.engine.telemetry import RequestRecord, Speculation, StepRecord

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """One registry per server. Times are seconds, as Prometheus wants them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"quantgate_{name}", what, labels, registry=self._registry)

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"quantgate_{name}", what, registry=self._registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"quantgate_{name}", what, buckets=buckets, registry=self._registry)

        self._waiting = gauge("requests_waiting", "Requests that wait for their first step, or to resume")
        self._running = gauge("requests_running", "Requests that hold KV blocks")
        self._usage = gauge("kv_cache_usage_ratio", "Share of the KV blocks in use")
        self._highest = gauge("kv_cache_usage_ratio_max", "The largest share of the KV blocks in use so far")
        self._hits = counter("prefix_cache_hit_tokens", "Prompt tokens that came from the prefix cache")
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests")
        self._output = counter("generation_tokens", "Tokens that finished requests were given")
        self._evictions = counter("kv_block_evictions", "Cached KV blocks that gave way")
        self._preemptions = counter("preemptions", "Times that a finished request had to begin anew")
        self._drafts = counter("speculative_drafts", "Drafts that a step verified")
        self._drafted = counter("speculative_draft_tokens", "Tokens of these drafts")
        self._accepted = counter("speculative_accepted_tokens", "Draft tokens that came true, by place", "position")
        self._finished = counter("requests_finished", "Requests that ended", "finish_reason")
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token", TTFT_BUCKETS)
        self._tpot = histogram("time_per_output_token_seconds", "Mean time per token after the first", TPOT_BUCKETS)
        self._peak = 0.0

    def observe(self, requests: list[RequestRecord], steps: list[StepRecord], speculation: Speculation) -> None:
        """What one step brought."""
        for record in requests:
            self._finished.labels(record.finish_reason).inc()
            self._prompt.inc(record.input_tokens)
            self._output.inc(record.output_tokens)
            self._hits.inc(record.prompt_cache_hit)
            self._preemptions.inc(record.preemptions)
            if record.ttft_ms is not None:
                self._ttft.observe(record.ttft_ms / 1e3)
            if record.tpot_ms is not None:
                self._tpot.observe(record.tpot_ms / 1e3)
        self._drafts.inc(speculation.drafts)
        self._drafted.inc(sum(speculation.drafted))
        for place, accepted in enumerate(speculation.accepted, start=1):
            self._accepted.labels(place).inc(accepted)
        for step in steps:
            self._evictions.inc(step.eviction_count)
            self._peak = max(self._peak, step.block_usage)

    def text(self) -> bytes:
        """Prometheus' text format, with the gauges as they are now."""
        scheduler, pool = self._engine.scheduler, self._engine.pool
        self._waiting.set(scheduler.num_waiting)
        self._running.set(len(scheduler.running))
        self._usage.set(pool.num_used / pool.num_blocks)
        self._highest.set(self._peak)
        return generate_latest(self._registry)
