"""Which order of neurons in a file needs the fewest reads: by frequency, or by co-activation.

    python -m benchmarks.neuron_order [--model PATH] [--tokens 8192]

A model reads text token by token, as in `benchmarks.neuron_cache`. The first three quarters are the
profile from which each order is made, and fill the slots; of the rest those neurons are read that
fire and are in no slot, neighbours together where at most a gap lies between them. What that takes
is reckoned for neurons of the llama-7b shape, whose gates are in memory: reads, bytes, and time on
a disk of `placement.storage.Disk`.
Source of the order by co-activation: Ripple, arXiv 2410.19274: those that fire together most often
are linked, until all are on paths
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from benchmarks.neuron_cache import LeastWanted, Trace, fired_neurons, tokens_to_read
from hotcold.model.config.build import read_config
from hotcold.model.files.locate import locate_model
from hotcold.placement.storage import Disk, Reads

_MAX_BYTES = 256 << 10  # of one read
_FORMATS = {"f16": (8192, 16384), "q4": (2560, 4608)}  # bytes of a gate, of up and down rows
_GAPS = (0, 16 << 10, 24 << 10)
_SHARES = (0.1, 0.2, 0.3)


def coactivation_order(fired: Sequence[np.ndarray], num_neurons: int) -> np.ndarray:
    """Neurons 0..N-1 on one path along which neighbours fire together as often as can be.

    Greedy: pairs by how often they fire together, each linked unless an end has two links or they
    are on one path already. Paths are put one after the other, those that fire most first.
    """
    who = np.zeros((len(fired), num_neurons), np.float32)
    for token, ids in enumerate(fired):
        who[token, ids] = 1
    counts = who.sum(0)
    pairs = np.triu((who.T @ who).astype(np.int32), 1)
    firsts, seconds = np.nonzero(pairs)
    # Of those that fire together equally often first those that seldom fire alone.
    together = pairs[firsts, seconds]
    alone = counts[firsts] + counts[seconds] - 2 * together
    links: list[list[int]] = [[] for _ in range(num_neurons)]
    path_of = np.arange(num_neurons)
    members = {neuron: [neuron] for neuron in range(num_neurons)}
    for k in np.lexsort((alone, -together)):
        one, other = int(firsts[k]), int(seconds[k])
        if len(links[one]) == 2 or len(links[other]) == 2 or path_of[one] == path_of[other]:
            continue
        links[one].append(other)
        links[other].append(one)
        small, large = sorted(
            (int(path_of[one]), int(path_of[other])), key=lambda p: len(members[p])
        )
        path_of[members[small]] = large
        members[large] += members.pop(small)
    paths = [_layer_state(links, path) for path in members.values()]
    paths.sort(key=lambda path: -float(np.mean(counts[path])))
    return np.concatenate(paths)


def _layer_state(links: Sequence[Sequence[int]], path: Sequence[int]) -> list[int]:
    """A path's neurons from one end to the other."""
    at, before = next(neuron for neuron in path if len(links[neuron]) < 2), -1
    found = [at]
    while len(found) < len(path):
        at, before = next(each for each in links[at] if each != before), at
        found.append(at)
    return found


def missed_neurons(warm: Trace, trace: Trace, num_slots: int) -> Trace:
    """Of who fires in `trace` those that were in no slot."""
    rates = Counter(int(n) for token in warm for fired in token for n in fired)
    wanted = {neuron: count / len(warm) for neuron, count in rates.items()}
    cache = LeastWanted(num_slots, wanted, 1 / 64, 16)
    found: Trace = []
    for token in trace:
        cache.forget()
        found.append(
            [np.array([n for n in fired if not cache.use(int(n))], int) for fired in token]
        )
    return found


def reads_of(missed: Trace, places: np.ndarray, gate: int, rest: int, gap: int) -> Reads:
    """Of one token, on average: places (L, N) of the neurons in a file of bundles."""
    number = num_bytes = 0
    num_neurons = places.shape[1]
    for token in missed:
        for layer, neurons in enumerate(token):
            begins = np.sort(places[layer, neurons % num_neurons]) * (gate + rest) + gate
            first = end = -_MAX_BYTES - gap
            for begin in begins.tolist():
                if begin - end > gap or begin + rest - first > _MAX_BYTES:
                    number, first, num_bytes = number + 1, begin, num_bytes + rest
                else:
                    num_bytes += begin + rest - end
                end = begin + rest
    return Reads(number / len(missed), num_bytes / len(missed))


@click.command()
@click.option("--model", type=click.Path(path_type=Path), help="The embedded model without it.")
@click.option("--tokens", default=8192, show_default=True)
def main(model: Path | None, tokens: int) -> None:
    """Print a table: orders, and what they read at shares of all neurons that are in memory."""
    path = locate_model(None if model is None else str(model))
    config = read_config(path)
    trace = fired_neurons(path, tokens_to_read(path, config, model is None, tokens))
    warm, counted = trace[: len(trace) * 3 // 4], trace[len(trace) * 3 // 4 :]
    num_layers, size = config.num_layers, config.ffn_size
    orders: dict[str, list[np.ndarray]] = {"checkpoint": [], "frequency": [], "co-activation": []}
    for layer in range(num_layers):
        fired = [token[layer] % size for token in warm]
        counts = np.bincount(np.concatenate(fired), minlength=size)
        orders["checkpoint"].append(np.arange(size))
        orders["frequency"].append(np.argsort(-counts, kind="stable"))
        orders["co-activation"].append(coactivation_order(fired, size))
    click.echo(f"{path}: {len(warm)} tokens of profile, {len(counted)} counted")
    click.echo("| in memory | format | order | gap KiB | missed | reads | MB | ms |")
    click.echo("|" + " --- |" * 8)
    for share in _SHARES:
        missed = missed_neurons(warm, counted, int(share * num_layers * size))
        number = sum(ids.size for token in missed for ids in token) / len(missed)
        for name, (gate, rest) in _FORMATS.items():
            for order, by_layer in orders.items():
                places = np.argsort(np.stack(by_layer), axis=1)
                for gap in _GAPS:
                    reads = reads_of(missed, places, gate, rest, gap)
                    said = [f"{share:.0%}", name, order, str(gap >> 10), f"{number:.1f}"]
                    said += [f"{reads.number:.1f}", f"{reads.num_bytes / 1e6:.2f}"]
                    said.append(f"{1e3 * Disk().seconds(reads):.2f}")
                    click.echo(f"| {' | '.join(said)} |")


if __name__ == "__main__":
    main()
