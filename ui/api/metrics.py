"""Metrics for Prometheus, under vLLM's names where the meaning is the same."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from hotcold.actors.protocol.messages import DriverLoad, Generation
from hotcold.actors.telemetry.experts import ExpertCounts

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

# Fields of `ExpertCounts`: names and texts of their counters.
_BY_EXPERT = {
    "chosen": ("hotcold:expert_tokens_total", "Tokens that had each expert."),
    "read": (
        "hotcold:expert_reads_total",
        "Steps, or chunks of prompts, that read each expert.",
    ),
    "missed": (
        "hotcold:expert_misses_total",
        "Reads of each expert that was not in memory, but on storage.",
    ),
}


class Metrics:
    """Counts of one model since the server's start, told with the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()
        self._registry = registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.model_name = model_name
        self.experts: ExpertCounts | None = None  # the newest counts of a mixture
        self._running = gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait.")
        self._kv_usage = gauge("vllm:kv_cache_usage_perc", "Allocated share of the KV cache.")
        self._prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts.")
        self._queried = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that were looked for in the KV cache."
        )
        self._cached = counter(
            "vllm:prefix_cache_hits", "Tokens of prompts that were found in the KV cache."
        )
        self._new_tokens = counter("vllm:generation_tokens", "Tokens chosen.")
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first event.",
            buckets=_FIRST_TOKEN_S,
        )  # fmt: skip
        self._token = histogram(
            "vllm:time_per_output_token_seconds", "Between two tokens.", buckets=_TOKEN_S
        )
        self._request = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last event.",
            buckets=_REQUEST_S,
        )  # fmt: skip
        self._finished = counter(
            "vllm:request_success", "Requests that ended, by why.", ["finished_reason"]
        )
        self._refused = counter(
            "hotcold:requests_refused", "Requests answered with an error, by HTTP status.",
            ["status"],
        )  # fmt: skip
        self._loaded = gauge("hotcold:model_loaded", "1 where the model is loaded, and answers.")
        self._starts = counter("hotcold:model_loads", "How often the model has loaded.")
        self._drafts = counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self._draft_tokens = counter(
            "vllm:spec_decode_num_draft_tokens", "Tokens of drafts that were verified, by source.",
            ["source"],
        )  # fmt: skip
        self._accepted = counter(
            "vllm:spec_decode_num_accepted_tokens", "Tokens of drafts that were chosen, by source.",
            ["source"],
        )  # fmt: skip
        self._accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "The same, by place in the draft.",
            ["position"],
        )  # fmt: skip
        self._neurons = gauge(
            "hotcold:neurons_computed_share", "Of all neurons, up and down, in the last request."
        )
        self._gates = gauge(
            "hotcold:gates_computed_share", "Of all neurons' gates, in the last request."
        )
        self._reads = {
            "bytes_read": gauge(
                "hotcold:storage_bytes_per_step", "Of neurons read, in the last request."
            ),
            "wait_share": gauge(
                "hotcold:storage_wait_share", "Of a step's time, waiting for neurons to be read."
            ),
            "hit_rate": gauge(
                "hotcold:storage_hit_rate", "Of neurons' parts that were needed, in memory."
            ),
        }

    def add_prompt(self, num_tokens: int, uses_cache: bool = False) -> None:
        """Count a request that was queued; `uses_cache`: part of it may be in the KV cache."""
        self._prompt_tokens.inc(num_tokens)
        if uses_cache:
            self._queried.inc(num_tokens)

    def add_first(self, since_arrival_s: float, num_tokens: int) -> None:
        """Count a request's first event."""
        self._first_token.observe(since_arrival_s)
        self._new_tokens.inc(num_tokens)

    def add_tokens(self, since_last_s: float, num_tokens: int) -> None:
        """Count an event of `num_tokens` tokens that is not the first."""
        self._new_tokens.inc(num_tokens)
        for _ in range(num_tokens):
            self._token.observe(since_last_s / num_tokens)

    def add_result(self, result: Generation, since_arrival_s: float) -> None:
        """Count a finished request."""
        self._request.observe(since_arrival_s)
        self._cached.inc(result.num_cached_tokens)
        self._count_end(result.finish_reason)
        if result.per_token_ms.get("total"):
            self._neurons.set(result.neurons_computed)
            self._gates.set(result.gates_computed)
        for name, gauge in self._reads.items() if result.reads else ():
            gauge.set(result.reads[name])
        drafts = result.drafts
        self._drafts.inc(drafts.num_drafts)
        for source, (num_drafted, num_accepted) in drafts.by_source.items():
            self._draft_tokens.labels(source).inc(num_drafted)
            self._accepted.labels(source).inc(num_accepted)
        for place, count in enumerate(drafts.accepted_at):
            self._accepted_at.labels(str(place)).inc(count)

    def add_abort(self) -> None:
        """Count a request that ended before its end: its client went away, or it took too long."""
        self._count_end("abort")

    def add_refusal(self, status: int) -> None:
        """Count an answer that is an error."""
        self._refused.labels(str(status)).inc()

    def add_start(self) -> None:
        """Count that the model has loaded."""
        self._starts.inc()

    def show(self, load: DriverLoad | None) -> None:
        """Set the gauges to the driver's load; None: it does not answer, or is not loaded."""
        self._loaded.set(load is not None)
        load = load or DriverLoad(0, 0, 0.0)
        self._running.set(load.num_running)
        self._waiting.set(load.num_waiting)
        self._kv_usage.set(load.kv_cache_usage)
        self.experts = load.experts or self.experts

    def families(self) -> Iterator[Metric]:
        """All of it, by name."""
        for family in self._registry.collect():
            family.samples = [
                one._replace(labels={"model_name": self.model_name, **one.labels})
                for one in family.samples
            ]
            yield family

    @property
    def prefix_cache(self) -> tuple[int, int]:
        """Tokens of prompts that were looked for in the KV cache, and those found there."""
        names = (f"vllm:prefix_cache_{what}_total" for what in ("queries", "hits"))
        queried, found = (int(self._registry.get_sample_value(name) or 0) for name in names)
        return queried, found

    def _count_end(self, reason: str) -> None:
        self._finished.labels("abort" if reason == "cancelled" else reason).inc()


def metrics_text(counts: Sequence[Metrics]) -> bytes:
    """The counts of all models in Prometheus' text format, in which each name stands once."""
    merged: dict[str, Metric] = {}
    for metrics in counts:
        for family in metrics.families():
            first = merged.setdefault(family.name, family)
            if first is not family:
                first.samples += family.samples

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return merged.values()

    return generate_latest(Merged()) + _experts_text(counts).encode()


def _experts_text(counts: Sequence[Metrics]) -> str:
    """Counts of each expert that a router chooses from; thousands of them: formatted directly."""
    lines = []
    experts = [(each.model_name, each.experts) for each in counts]
    for field, (name, text) in _BY_EXPERT.items():
        samples: list[str] = []
        for model_name, found in experts:
            if found is not None and getattr(found, field) is not None:
                samples += _samples(name, model_name, found.num_experts, getattr(found, field))
        if samples:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} counter", *samples]
    return "".join(f"{line}\n" for line in lines)


def _samples(
    name: str, model_name: str, num_experts: np.ndarray, values: np.ndarray
) -> Iterator[str]:
    """A line for each expert of `values` (L, B)."""
    label = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    for layer, count in enumerate(num_experts.tolist()):
        begin = f'{name}{{model_name="{label}",layer="{layer}",expert="'
        for expert, value in enumerate(values[layer, :count].tolist()):
            yield f'{begin}{expert}"}} {value}'
