"""A system without processes that answers by the book, for tests of the page and of its speed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotcold.actors.protocol.messages import GenerateRequest, Generation, SystemConfig, TokenEvent
from hotcold.actors.protocol.topology import Topology
from hotcold.actors.setup.assignment import neuron_owners
from hotcold.actors.setup.shards import service_specs
from hotcold.actors.telemetry.experts import ExpertCounts
from hotcold.actors.telemetry.snapshot import ActorHealth, NeuronMap, Speed, Telemetry
from hotcold.model.config.build import read_config
from hotcold.model.files.locate import DEMO_DIRECTORY

Deliver = Callable[[TokenEvent | BaseException], None]
TEXT = """`textwrap.dedent` removes the whitespace that **all** lines have in common:

```python
import textwrap

print(textwrap.dedent(text))
```

1. Blank lines are normalized to a newline.
2. Tabs and blanks are both whitespace, but they are not equal.

It is often used with triple-quoted strings, so that they line up with the code around them.

"""


def mixture_map() -> NeuronMap:
    """12 layers of 40 ReLU experts, of which a token chooses 4, and a shared one; the first dense.

    Expert 0 of layer 1 has 25 of 100 tokens, and no token chose expert 39.
    """
    rng = np.random.default_rng(2)
    num_layers, num_experts, size, num_tokens = 12, 40, 64, 100
    num = np.full((num_layers, num_experts + 1), size)
    chosen = np.zeros(num.shape, np.int64)
    for layer in range(1, num_layers):
        weights = rng.permuted(1 / np.arange(1, num_experts) ** 0.7)
        chosen[layer, : num_experts - 1] = rng.multinomial(4 * num_tokens, weights / weights.sum())
    chosen[1, 1 + chosen[1, 1:].argmax()] += chosen[1, 0] - 25
    chosen[1, 0] = 25
    chosen[1:, num_experts] = num_tokens
    last = np.zeros(num.shape, np.int64)
    for layer in range(1, num_layers):
        last[layer, rng.choice(num_experts - 1, 4, replace=False)] = size
    last[0] = last[1:, num_experts] = size
    mean = num * chosen / num_tokens
    mean[0] = size
    experts = ExpertCounts(
        np.array([0, *[num_experts] * (num_layers - 1)]), 4, chosen, np.minimum(chosen, num_tokens)
    )
    hot, computed = np.zeros_like(num), last // 3
    return NeuronMap(num, hot, computed, last, mean / 3, mean, num_tokens, experts)


@dataclass
class StandIn:
    """In place of `System` and of the client that asks it. Answers repeat words of `text`."""

    text: str = TEXT
    tokens_per_s: float = 250.0
    first_s: float = 0.05  # before an answer's first token
    num_tokens: int = 60  # of an answer
    held_at: int | None = None  # an answer has so many, and no more as long as this stands
    error: Exception | None = None  # in place of an answer, or with `num_tokens` in its midst
    device: str = "cpu"
    has_experts: bool = False  # as a mixture shows itself
    mode: str = "exact"
    reads: dict[str, float] = field(default_factory=dict)  # of storage
    requests: list[GenerateRequest] = field(default_factory=list)
    _stopped: set[str] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    num_running: int = 0

    def reset(self) -> None:
        """As it was made, but for the requests that it has seen and those that run."""
        for name, value in vars(StandIn()).items():
            if not name.startswith("_") and name not in ("requests", "num_running"):
                setattr(self, name, value)

    def call(self, method: str, *args: Any) -> Any:
        """As `System.call`."""
        return getattr(self, method)(*args)

    def describe(self) -> SystemConfig:
        """A system of two CPU services."""
        return SystemConfig(
            str(DEMO_DIRECTORY), num_cpu_actors=2, num_threads=2, context_length=1024,
            device=self.device,
        )  # fmt: skip

    def neuron_owners(self) -> Any:
        """See `actors.setup.assignment`."""
        config = read_config(DEMO_DIRECTORY)
        return neuron_owners(config, Topology(tuple(service_specs(self.describe(), config))))

    def telemetry(self, *_: Any) -> Telemetry:
        """The demo model's shape, or a mixture's; the same neurons at every token."""
        if self.has_experts:
            neurons = mixture_map()
        else:
            config = read_config(DEMO_DIRECTORY)
            num = np.full((config.num_layers, 64), config.ffn_size // 64)
            share = np.random.default_rng(1).beta(0.5, 2, num.shape)
            computed, gates = (num * share).astype(np.int64), num.copy()
            hot = np.zeros_like(num)
            neurons = NeuronMap(num, hot, computed, gates, computed * 1.0, gates * 1.0, 1)
        times = {"attention": 0.6, "ffn": 1.1, "head": 0.4, "exchange": 0.2, "python": 0.1}
        speed = Speed(self.tokens_per_s, {**times, "total": 2.4}, 0.21, 1.0, reads=self.reads)
        actors = tuple(
            ActorHealth(name, "alive", 1000 + i, 300 << 20, self.device if i == 1 else "cpu")
            for i, name in enumerate(("driver", "gpu", "cpu0", "cpu1"))
        )
        running = self.num_running
        return Telemetry(
            self.mode, 60.0, running, 0, running, 16, speed, neurons, actors, 24 << 30, 9 << 30
        )

    async def submit(self, request: GenerateRequest, deliver: Deliver) -> str:
        """As `AsyncClient.submit`."""
        self.requests.append(request)
        name = str(len(self.requests))
        task = asyncio.create_task(self._answer(name, request, deliver))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return name

    def stop(self, name: str) -> None:
        """As `AsyncClient.stop`."""
        self._stopped.add(name)

    cancel = stop

    async def _answer(self, name: str, request: GenerateRequest, deliver: Deliver) -> None:
        self.num_running += 1
        try:
            await asyncio.sleep(self.first_s)
            loop = asyncio.get_running_loop()
            began, said = loop.time(), 0
            words = self.text.split(" ")
            wanted = min(self.num_tokens, request.sampling.max_tokens or self.num_tokens)
            while said < wanted and name not in self._stopped:
                most = wanted if self.held_at is None else min(wanted, self.held_at)
                due = min(most, 1 + int((loop.time() - began) * self.tokens_per_s))
                if due > said:
                    text = " ".join(words[i % len(words)] for i in range(said, due))
                    deliver(TokenEvent(f"{text} ", num_tokens=due - said))
                    said = due
                await asyncio.sleep(0.5 / self.tokens_per_s)
            if self.error is not None:
                deliver(self.error)
                return
            reason = "cancelled" if name in self._stopped else "length"
            seconds = loop.time() - began
            result = Generation(
                "", [1] * said, reason, 8, self.first_s, seconds, neurons_computed=0.21
            )
            deliver(TokenEvent("", result))
        finally:
            self.num_running -= 1
