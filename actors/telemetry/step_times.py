"""Where the time of a step goes."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from hotcold.numba_kernels.loops.layer_loop import (
    ATTENTION_BUSY_NS,
    ATTENTION_WAITED_NS,
    FFN_BUSY_NS,
    FFN_WAITED_NS,
    HEAD_BUSY_NS,
    HEAD_WAITED_NS,
    LAYERS_BUSY_NS,
    LAYERS_WAITED_NS,
    PREDICTOR_NS,
    SUM_COMPUTED,
    SUM_GATES,
    SUM_UPS,
)

PARTS = ("attention", "head", "ffn", "layers", "predictor", "draft")
# Of neurons on storage: bytes that all services read, the slowest one's wait for them, parts of
# neurons that were wanted, and parts that were not in memory; of experts those that could be
# guessed, and were; parts that were read ahead, and those of them that were of use.
READS = (
    *("bytes_read", "wait_ns", "wanted", "missed"),
    *("guessable", "guessed", "ahead", "useful"),
)


@dataclass
class StepTimes:
    """Sums over some steps, in nanoseconds except for the counts.

    A part's time is what its slowest service was busy; `layers` are those that a GPU computes as a
    whole, and have no share in `attention` and `ffn`; of `draft` all that drafts took;
    `exchange` is what the driver waited beyond that; the rest of `total` is the driver's own:
    Python, and sums of partial outputs.
    """

    total: int = 0
    exchange: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_neurons: int = 0
    num_gates: int = 0
    num_ups: int = 0
    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    reads: dict[str, int] = field(default_factory=lambda: dict.fromkeys(READS, 0))

    @contextmanager
    def step(self, num_tokens: int) -> Iterator[None]:
        """Time one step of `num_tokens`."""
        started = time.monotonic_ns()
        yield
        self.total += time.monotonic_ns() - started
        self.num_steps += 1
        self.num_tokens += num_tokens

    def add(self, part: str, waited_ns: int, busy_ns: int) -> None:
        """Count one exchange: the driver's wait, and the slowest service's work."""
        self.parts[part] += int(busy_ns)
        self.exchange += waited_ns - int(busy_ns)

    def add_draft(self, took_ns: int) -> None:
        """Count what it took to propose tokens for a step."""
        self.parts["draft"] += took_ns
        self.total += took_ns

    def add_layers(self, layer_state: np.ndarray) -> None:
        """Count the sums of a layer loop (`numba_kernels.loops.layer_loop`)."""
        sums = layer_state.tolist()
        self.add("attention", sums[ATTENTION_WAITED_NS], sums[ATTENTION_BUSY_NS])
        self.add("ffn", sums[FFN_WAITED_NS], sums[FFN_BUSY_NS])
        self.add("layers", sums[LAYERS_WAITED_NS], sums[LAYERS_BUSY_NS])
        self.add("head", sums[HEAD_WAITED_NS], sums[HEAD_BUSY_NS])
        self.parts["predictor"] += sums[PREDICTOR_NS]
        self.count_neurons(sums[SUM_COMPUTED], sums[SUM_UPS], sums[SUM_GATES])

    def count_neurons(self, num_neurons: int, num_ups: int, num_gates: int) -> None:
        """Count neurons that were computed, and those of which up, or the gate, was."""
        self.num_neurons += num_neurons
        self.num_ups += num_ups
        self.num_gates += num_gates

    def count_reads(self, found: Sequence[int]) -> None:
        """Count what services read for a step, in the order of READS."""
        for name, number in zip(READS, found, strict=True):
            self.reads[name] += number

    def include(self, other: "StepTimes") -> None:
        """Add the sums of other steps."""
        self.total += other.total
        self.exchange += other.exchange
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.count_neurons(other.num_neurons, other.num_ups, other.num_gates)
        for part, busy_ns in other.parts.items():
            self.parts[part] += busy_ns
        self.count_reads(list(other.reads.values()))

    def ms_by_parts(self, number: int) -> dict[str, float]:
        """Milliseconds of each of `number` steps or tokens: PARTS, exchange, python, total."""
        scale = 1e-6 / max(number, 1)
        python = self.total - self.exchange - sum(self.parts.values())
        result = {part: ns * scale for part, ns in self.parts.items()}
        return result | {
            "exchange": self.exchange * scale,
            "python": python * scale,
            "total": self.total * scale,
        }

    def per_step_reads(self) -> dict[str, float]:
        """Of neurons on storage: bytes a step, share of time waited, hit rate; {} without any.

        Where experts are guessed the share of those chosen that were (the router's recall a layer
        before); where something was read ahead how much of it was of use.
        """
        reads = self.reads
        if not reads["wanted"]:
            return {}
        found = {
            "bytes_read": reads["bytes_read"] / max(self.num_steps, 1),
            "wait_share": reads["wait_ns"] / max(self.total, 1),
            "hit_rate": 1 - reads["missed"] / reads["wanted"],
        }
        if reads["guessable"]:
            found["recall"] = reads["guessed"] / reads["guessable"]
        if reads["ahead"]:
            found["useful_ahead"] = reads["useful"] / reads["ahead"]
        return found


@dataclass(frozen=True)
class StepRecord:
    """A step of answers, or all steps of one answer: none of them reads a prompt alone.

    ended_s: monotonic seconds
    num_new_tokens: those after an answer's first, which is its prompt's
    drafts: of each source the tokens of drafts that it verified, and how many were chosen
    """

    ended_s: float
    num_new_tokens: int
    times: StepTimes
    drafts: dict[str, list[int]] = field(default_factory=dict)
    took_s: float | None = None  # from the first new token on, of an answer

    @property
    def began_s(self) -> float:
        """When it began, in monotonic seconds."""
        took_s = self.times.total * 1e-9 if self.took_s is None else self.took_s
        return self.ended_s - took_s


def sum_drafts(found: Iterable[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Sums of each source's numbers, tokens and those that were chosen; sources with tokens."""
    sums: dict[str, list[int]] = {}
    for drafts in found:
        for source, (num_drafted, num_accepted) in drafts.items():
            if num_drafted:
                before = sums.get(source, (0, 0))
                sums[source] = [before[0] + num_drafted, before[1] + num_accepted]
    return sums
