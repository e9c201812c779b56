"""Which rule keeps the right neurons in memory: hit rates over who really fires.

    python -m benchmarks.neuron_cache [--model PATH] [--tokens 1024]

A model reads text token by token (the demo model the text that it was not trained on; any other
drawn ids), and rules for a cache of a share of all neurons are played over who fired. Half of the
tokens are the profile that pinned neurons are chosen by, the other half is what is counted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path

import click
import numpy as np

from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.locate import locate_model
from hotcold.model.text.tokenizer import Tokenizer

Trace = list[list[np.ndarray]]  # by tokens and layers: the neurons that fire, numbered over all
_WINDOW = 256  # tokens of a text that see each other
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


def fired_neurons(path: Path, ids: list[int]) -> Trace:
    """Who fires for each token in each layer of a ReLU Llama, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    fired: dict[int, np.ndarray] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: object, inputs: object, gates: torch.Tensor) -> None:
            fired[layer] = (gates[0] > 0).numpy()

        return hook

    for layer, block in enumerate(model.model.layers):
        block.mlp.gate_proj.register_forward_hook(keep(layer))
    found: Trace = []
    with torch.no_grad():
        for first in range(0, len(ids), _WINDOW):
            window = ids[first : first + _WINDOW]
            model(torch.tensor([window]))
            for token in range(len(window)):
                layers = [(layer, np.flatnonzero(who[token])) for layer, who in fired.items()]
                size = model.config.intermediate_size
                found.append([layer * size + neurons for layer, neurons in layers])
    return found


class Lru:
    """The one that was used longest ago goes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: OrderedDict[int, None] = OrderedDict()

    def use(self, neuron: int) -> bool:
        """Whether it was there; it is afterwards."""
        hit = neuron in self.held
        if hit:
            self.held.move_to_end(neuron)
        else:
            if len(self.held) >= self.size:
                self.held.popitem(last=False)
            self.held[neuron] = None
        return hit


class Clock:
    """Up to `most` more passes of a hand for what was used again."""

    def __init__(self, size: int, most: int = 3) -> None:
        self.size, self.most = size, most
        self.queue: deque[int] = deque()
        self.credit: dict[int, int] = {}

    def use(self, neuron: int) -> bool:
        """See `Lru.use`."""
        if neuron in self.credit:
            self.credit[neuron] = min(self.most, self.credit[neuron] + 1)
            return True
        while len(self.queue) >= self.size:
            other = self.queue.popleft()
            if self.credit[other]:
                self.credit[other] -= 1
                self.queue.append(other)
            else:
                del self.credit[other]
        self.queue.append(neuron)
        self.credit[neuron] = 0
        return False


class S3Fifo:
    """A tenth for newcomers, who go on if used again; those that went lately come to the rest."""

    def __init__(self, size: int) -> None:
        self.small_size = max(1, size // 10)
        self.small: deque[int] = deque()
        self.main = Clock(max(1, size - self.small_size))
        self.credit: dict[int, int] = {}
        self.ghost: OrderedDict[int, None] = OrderedDict()

    def use(self, neuron: int) -> bool:
        """See `Lru.use`."""
        if neuron in self.main.credit:
            return self.main.use(neuron)
        if neuron in self.credit:
            self.credit[neuron] += 1
            return True
        if self.ghost.pop(neuron, 0) is None:
            self.main.use(neuron)
            return False
        if len(self.small) >= self.small_size:
            self._leave(self.small.popleft())
        self.small.append(neuron)
        self.credit[neuron] = 0
        return False

    def _leave(self, neuron: int) -> None:
        if self.credit.pop(neuron):
            self.main.use(neuron)
            return
        self.ghost[neuron] = None
        if len(self.ghost) > self.main.size:
            self.ghost.popitem(last=False)


class Pinned:
    """`share` of the cache for those that fire most often by the profile, for ever."""

    def __init__(self, size: int, often: list[int], share: float, rest: Callable[[int], Clock]):
        num_pinned = int(size * share)
        self.pinned = set(often[:num_pinned])
        self.rest = rest(max(1, size - num_pinned))

    def use(self, neuron: int) -> bool:
        """See `Lru.use`."""
        return neuron in self.pinned or self.rest.use(neuron)


class LeastWanted:
    """`numba_kernels.storage.neuron_slots`: of some slots the neuron goes that is wanted least.

    `rates` is how often each was wanted before; `memory` what once more counts of that.
    """

    def __init__(self, size: int, rates: dict[int, float], memory: float, looked_at: int) -> None:
        self.size, self.memory, self.looked_at = size, memory, looked_at
        self.rates = defaultdict(float, rates)
        self.rows = sorted(rates, key=lambda neuron: -rates[neuron])[:size]
        self.slot_of = {neuron: slot for slot, neuron in enumerate(self.rows)}
        self.growth, self.hand = 1.0, 0

    def use(self, neuron: int) -> bool:
        """See `Lru.use`."""
        # All others become less by being measured in a unit that grows.
        self.rates[neuron] += self.memory * self.growth
        if neuron in self.slot_of:
            return True
        if len(self.rows) < self.size:
            self.slot_of[neuron] = len(self.rows)
            self.rows.append(neuron)
            return False
        looked = [(self.hand + i) % self.size for i in range(self.looked_at)]
        self.hand = (self.hand + self.looked_at) % self.size
        slot = min(looked, key=lambda slot: self.rates[self.rows[slot]])
        del self.slot_of[self.rows[slot]]
        self.rows[slot], self.slot_of[neuron] = neuron, slot
        return False

    def forget(self) -> None:
        """Before each token."""
        self.growth /= 1 - self.memory


Cache = Lru | Clock | S3Fifo | Pinned | LeastWanted


def hit_rate(cache: Cache, warm: Trace, trace: Trace) -> float:
    """Of the neurons that fire in `trace`, those that were there, after `warm`."""
    num_hits = num_used = 0
    for counts, tokens in ((False, warm), (True, trace)):
        for token in tokens:
            if isinstance(cache, LeastWanted):
                cache.forget()
            for neuron in _all([token]):
                hit = cache.use(neuron)
                num_hits += hit and counts
                num_used += counts
    return num_hits / num_used


def _all(trace: Trace) -> Iterable[int]:
    return (int(neuron) for layers in trace for fired in layers for neuron in fired)


def tokens_to_read(path: Path, config: ModelConfig, is_embedded: bool, count: int) -> list[int]:
    """The embedded model's held-out text; drawn ids for any other."""
    tokenizer = Tokenizer.from_model(path)
    if is_embedded and tokenizer is not None:
        text = (path / "heldout.txt").read_text()[: 8 * count]
        return list(tokenizer.encode(text))[:count]
    return [int(each) for each in np.random.default_rng(0).integers(0, config.vocab_size, count)]


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="The embedded model without it.")
@click.option("--tokens", default=1024, show_default=True)
def main(model: Path | None, tokens: int) -> None:
    """Print a table: rules, and shares of all neurons that are held."""
    path = locate_model(None if model is None else str(model))
    config = read_config(path)
    trace = fired_neurons(path, tokens_to_read(path, config, model is None, tokens))
    warm, counted = trace[: tokens // 2], trace[tokens // 2 :]
    often = [neuron for neuron, _ in Counter(_all(warm)).most_common()]
    num_neurons = config.num_neurons
    density = sum(1 for _ in _all(counted)) / len(counted) / num_neurons
    click.echo(f"{path}: {tokens} tokens, {density:.1%} of {num_neurons} neurons fire")
    click.echo("| share held | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |")
    click.echo("| --- |" + " --- |" * len(SHARES))
    rules: dict[str, Callable[[int], Cache]] = {
        "LRU": Lru,
        "clock, 1 bit": lambda size: Clock(size, 1),
        "clock, 3 passes": Clock,
        "S3-FIFO": S3Fifo,
    }
    for share in (0.25, 0.5, 0.75, 1.0):
        rules[f"{share:.0%} pinned, clock"] = lambda size, share=share: Pinned(
            size, often, share, Clock
        )
    wanted = {neuron: count / len(warm) for neuron, count in Counter(_all(warm)).items()}
    for looked_at in (8, 16, 32):
        rules[f"least wanted of {looked_at}"] = lambda size, looked_at=looked_at: LeastWanted(
            size, wanted, 1 / 64, looked_at
        )
    for name, rule in rules.items():
        rates = [hit_rate(rule(int(share * num_neurons)), warm, counted) for share in SHARES]
        click.echo(f"| {name} | " + " | ".join(f"{rate:.1%}" for rate in rates) + " |")


if __name__ == "__main__":
    main()
