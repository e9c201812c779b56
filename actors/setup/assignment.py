"""How neurons are dealt to CPU services and their threads."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hotcold.actors.setup.hot_neurons import Layers
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.weights.ffn import UNIT


def deal_neurons(num_neurons: int, num_services: int, num_threads: int) -> list[np.ndarray]:
    """`deal_to_threads` of services that have `num_threads` threads each."""
    return deal_to_threads(num_neurons, [num_threads] * num_services)


def deal_to_threads(num_neurons: int, threads: Sequence[int]) -> list[np.ndarray]:
    """Ids of one layer for each service, in its loading order.

    Service s has threads[s] threads, and so large a share. Neighbours in the checkpoint
    are dealt to different threads in turn, so that no thread gets a run of neurons that fire alike.
    A service's order is its threads' deals one after the other. Its threads cut that order in
    multiples of four (`numba_kernels.decode.rows.split_range`), so a cut may stand a few neurons
    beside the end of a deal.
    Dtypes:  int32
    """
    ids = np.arange(num_neurons, dtype=np.int32)
    turns = range(max(threads))
    owners = [s for turn in turns for s, count in enumerate(threads) if turn < count]
    assignments = [ids[thread :: len(owners)] for thread in range(len(owners))]
    return [
        np.concatenate(
            [deal for deal, owner in zip(assignments, owners, strict=True) if owner == service]
        )
        for service in range(len(threads))
    ]


def _assigned(ids: np.ndarray, num_threads: int) -> np.ndarray:
    """One service's neurons of a layer in its loading order."""
    return ids[deal_neurons(ids.size, 1, num_threads)[0]]


def cold_shards(
    threads: Sequence[int], planned: list[Layers] | None, others: Layers
) -> list[Layers]:
    """Each CPU service's neurons in its loading order: its planned ones, and its deal of others."""
    assignments = {ids.size: deal_to_threads(ids.size, threads) for ids in others}
    shards = [[ids[assignments[ids.size][s]] for ids in others] for s in range(len(threads))]
    if planned is None:
        return shards
    return [
        [
            _assigned(np.union1d(own, more).astype(np.int32), threads[s])
            for own, more in zip(planned[s], shards[s], strict=True)
        ]
        for s in range(len(threads))
    ]


def neuron_runs(num_neurons: int, threads: Sequence[int]) -> list[np.ndarray]:
    """Ids of one layer for each service: runs of them, where none is chosen first.

    They are cut at multiples of UNIT. Service s has threads[s] threads, and about so large a share,
    a UNIT at least: there are as many.
    Dtypes:  int32
    """
    units, count = -(-num_neurons // UNIT), len(threads)
    cuts = [0]
    for service in range(1, count):
        share = units * sum(threads[:service]) // sum(threads)
        cuts.append(min(max(share, cuts[-1] + 1), units - count + service))
    ends = [min(UNIT * cut, num_neurons) for cut in (*cuts, units)]
    return [np.arange(*span, dtype=np.int32) for span in pairwise(ends)]


def runs_of_layers(threads: Sequence[int], config: ModelConfig) -> list[Layers]:
    """`neuron_runs` of each service, in every layer."""
    return [[run] * config.num_layers for run in neuron_runs(config.ffn_size, threads)]
