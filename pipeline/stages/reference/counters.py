"""What the engine counts, and how it says it: Prometheus text and log lines, under SGLang 0.5.15's names."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.stages.protocol import log

DECODE_LOG_STEPS = 40
LATENCY_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)


def stamped(text: str) -> None:
    log(f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}")


class Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS, value)] += 1
        self.sum += value


@dataclass
class Counters:
    """Written by the model thread and the HTTP loop, each its own fields; read by anybody."""

    steps: int  # drafts per verify step, 0 without speculation
    capacity: int  # cache positions
    started: float = field(default_factory=time.time)
    load_seconds: float = 0.0
    # For ever.
    prompt_tokens: int = 0
    generation_tokens: int = 0
    requests: int = 0
    aborted: int = 0
    verify_calls: int = 0
    accepted_drafts: int = 0
    http: Counter[tuple[str, str]] = field(default_factory=Counter)
    # Since the last flush, as SGLang does.
    lifetime_verify: int = 0
    lifetime_accepted: int = 0
    # Now, or as last seen while busy.
    running: int = 0
    queued: int = 0
    used_tokens: int = 0
    throughput: float = 0.0  # tokens/s over the last DECODE_LOG_STEPS steps
    accept_length: float = 0.0
    first_token: Histogram = field(default_factory=Histogram)
    whole_request: Histogram = field(default_factory=Histogram)
    lock: threading.Lock = field(default_factory=threading.Lock)
    # The window of the next decode line.
    _steps: int = 0
    _tokens: int = 0
    _verify: int = 0
    _accepted: int = 0
    _since: float = field(default_factory=time.monotonic)

    def prefill(self, sequences: int, tokens: int) -> None:
        self.prompt_tokens += tokens
        self.generation_tokens += sequences  # each prompt yields its first token
        stamped(
            f"Prefill batch, #new-seq: {sequences}, #new-token: {tokens}, #cached-token: 0, "
            f"token usage: {self.used_tokens / self.capacity:.2f}, #running-req: {self.running}, "
            f"#queue-req: {self.queued}, cuda graph: False"
        )

    def decoded(self, tokens: int, verify: int, accepted: int) -> None:
        """One step of the batch: tokens emitted, rows verified, drafts accepted."""
        self.generation_tokens += tokens
        self.verify_calls += verify
        self.accepted_drafts += accepted
        self.lifetime_verify += verify
        self.lifetime_accepted += accepted
        self._steps += 1
        self._tokens += tokens
        self._verify += verify
        self._accepted += accepted
        if self._steps >= DECODE_LOG_STEPS:
            self.decode_line()

    def idle(self) -> None:
        """Nothing runs: the next window must not count the pause."""
        self._steps = self._tokens = self._verify = self._accepted = 0
        self._since = time.monotonic()

    def decode_line(self) -> None:
        now = time.monotonic()
        self.throughput = self._tokens / (now - self._since)
        speculative = ""
        if self._verify:
            self.accept_length = 1 + self._accepted / self._verify
            speculative = f"accept len: {self.accept_length:.2f}, accept rate: {self.accept_rate:.2f}, "
        stamped(
            f"Decode batch, #running-req: {self.running}, #token: {self.used_tokens}, "
            f"token usage: {self.used_tokens / self.capacity:.2f}, {speculative}cuda graph: False, "
            f"gen throughput (token/s): {self.throughput:.2f}, #queue-req: {self.queued}"
        )
        self.idle()

    @property
    def accept_rate(self) -> float:
        """Accepted over proposed drafts, SGLang's meaning since 0.5.14."""
        return (self.accept_length - 1) / self.steps if self.steps and self.accept_length else 0.0


def prometheus(c: Counters, model: str, context: int) -> str:
    """The body of /metrics."""
    return "\n".join(_lines(c, model, context)) + "\n"


def _lines(c: Counters, model: str, context: int) -> Iterator[str]:
    model_label = _label("model_name", model)
    own = f'engine_type="unified",{model_label}'
    rank = own + ',moe_ep_rank="0",pp_rank="0",tp_rank="0"'
    counters = [
        ("prompt_tokens_total", "Number of prefill tokens processed.", c.prompt_tokens),
        ("generation_tokens_total", "Number of generation tokens processed.", c.generation_tokens),
        ("num_requests_total", "Number of requests processed.", c.requests),
        ("num_aborted_requests_total", "Number of requests aborted.", c.aborted),
    ]
    if c.steps:
        counters += (("spec_verify_calls_total", "Number of speculative decoding verification calls.", c.verify_calls),)
    for name, text, value in counters:
        yield from _one(name, "counter", text, own, value)
    yield "# HELP sglang:http_requests_total Total number of HTTP requests by endpoint and method"
    yield "# TYPE sglang:http_requests_total counter"
    for (endpoint, method), count in sorted(c.http.items()):
        yield f"sglang:http_requests_total{{{_label('endpoint', endpoint)},{_label('method', method)}}} {float(count)}"
    gauges = [
        ("num_running_reqs", "The number of running requests.", c.running),
        ("num_queue_reqs", "The number of requests in the waiting queue.", c.queued),
        ("gen_throughput", "The generation throughput (token/s).", c.throughput),
        ("num_used_tokens", "The number of used tokens.", c.used_tokens),
        ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", c.capacity),
        ("token_usage", "The token usage.", c.used_tokens / c.capacity),
        ("context_len", "Maximum context length.", context),
        ("engine_startup_time", "The time taken for the engine to start up.", c.load_seconds),
    ]
    if c.steps:
        gauges += [
            ("spec_accept_length", "Mean acceptance length (accepted drafts + bonus token).", c.accept_length),
            ("spec_accept_rate", "Speculative acceptance rate (accepted / proposed drafts).", c.accept_rate),
            ("spec_num_steps", "Currently active speculative_num_steps.", c.steps),
            ("spec_num_draft_tokens", "Currently active speculative_num_draft_tokens.", c.steps + 1),
        ]
    for name, text, gauge in gauges:
        yield from _one(name, "gauge", text, rank, gauge)
    first = "Histogram of time to first token in seconds."
    yield from _histogram("time_to_first_token_seconds", first, own, c.first_token)
    whole = "Histogram of End-to-end request latency in seconds"
    yield from _histogram("e2e_request_latency_seconds", whole, own, c.whole_request)


def _one(name: str, kind: str, text: str, labels: str, value: float) -> Iterator[str]:
    yield f"# HELP sglang:{name} {text}"
    yield f"# TYPE sglang:{name} {kind}"
    yield f"sglang:{name}{{{labels}}} {float(value)}"


def _histogram(name: str, text: str, labels: str, h: Histogram) -> Iterator[str]:
    yield f"# HELP sglang:{name} {text}"
    yield f"# TYPE sglang:{name} histogram"
    total = 0
    for edge, count in zip((*map(str, map(float, LATENCY_BUCKETS)), "+Inf"), h.counts, strict=True):
        total += count
        yield f'sglang:{name}_bucket{{{labels},le="{edge}"}} {float(total)}'
    yield f"sglang:{name}_sum{{{labels}}} {h.sum}"
    yield f"sglang:{name}_count{{{labels}}} {float(total)}"


def _label(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}="{escaped}"'
