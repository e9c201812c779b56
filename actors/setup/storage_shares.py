"""How best to use memory for offloaded neurons: for gates, read-ahead predictors, or slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import SystemConfig
from hotcold.actors.protocol.offloaded_neurons import WORD_BYTES, NeuronStorage
from hotcold.actors.protocol.stripes import output_run, output_stripes
from hotcold.actors.setup.assignment import hot_neurons
from hotcold.actors.setup.gpu_share import num_cold_neurons
from hotcold.actors.setup.shards import service_threads
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import numpy_dtype
from hotcold.model.files.artifact import ModelIdentity
from hotcold.model.weights.memory import free_shared_memory
from hotcold.model.weights.sizes import ffn_bytes, predictor_bytes_a_neuron
from hotcold.numba_kernels.formats import ROW_FORMATS
from hotcold.numba_kernels.storage import READ_BYTES, RING_DEPTH
from hotcold.placement.expert_reuse import missed_share
from hotcold.placement.profile import ActivationProfile
from hotcold.placement.storage import (
    Disk,
    Reads,
    Resident,
    expected_reads,
    expert_reads,
    gates_first,
    missed_experts,
    whole_bundles,
)
from hotcold.predictors.predictor_file import read_predictors
from hotcold.predictors.read_ahead import words_to_read_ahead

_ROW_BYTES = 64  # of each neuron: its place, checksums, biases, counts
# Of each neuron of an expert: its number (twice), biases, bucket, norms (file's, own), count.
_EXPERT_NEURON_BYTES = 8 + 8 + 2 + 8 + 8
_SLOT_BYTES = 24  # of each slot: its owner, biases
_UNIT_BYTES = 21 * 8  # of a service's part of an expert whose down is a row an output: places, cut
_UNKNOWN_RATE = 0.1  # firing rate assumed without a profile
_DIVISIONS = 32  # steps between all memory for whole neurons and all for gates
_SHARED_BYTES_LEFT = 256 << 20  # of shared memory for the rest of the arena
_SPARE_FOR_AHEAD = 4  # times the predictors' bytes must be spare to keep them


def divided(
    profile: ActivationProfile | None,
    system: SystemConfig,
    config: ModelConfig,
    least: NeuronStorage,
    spare: int,
) -> NeuronStorage:
    """The fastest way to use `spare` bytes, of all hosts, beyond `least`. Errors: ArtifactError."""
    if config.experts is not None:  # whole experts
        return next(_divisions(system, config, least, spare))
    num_words = _words_to_read_ahead(system, config)
    shared = num_words if _shares_bits(system, num_words) else 0
    ahead = replace(least, predictors=system.predictors_path or "", predictor_words=shared)
    num_bytes = _own_predictor_bytes(ahead)
    if num_words and _SPARE_FOR_AHEAD * num_bytes < spare:
        least, spare = ahead, spare - num_bytes
    found = list(_divisions(system, config, least, spare))
    if not system.predictors_path:
        found = [found[0], *found[-1:]]  # every gate is always read: keep all, or none
    disk = Disk()
    return min(found, key=lambda kept: disk.seconds(token_reads(profile, system, config, kept)))


def _divisions(
    system: SystemConfig, config: ModelConfig, least: NeuronStorage, spare: int
) -> Iterator[NeuronStorage]:
    """Divisions of `spare` bytes: first all for whole neurons, then more and more for gates."""
    geometry, num_cold = BundleGeometry.of(config), num_cold_neurons(system, config)
    num_cold += more_slot_neurons(system, config, len(routed_layers(config)))
    gate_bytes, up_down_bytes = slot_bytes(geometry)
    most = max(0, num_cold - least.num_gates)
    whole = min(most, spare // (gate_bytes + up_down_bytes))
    most_gates = whole if system.mode == "dense" else min(most, spare // gate_bytes)
    for step in range(_DIVISIONS + 1):
        gates = whole + (most_gates - whole) * step // _DIVISIONS
        up_downs = min(most, (spare - gates * gate_bytes) // up_down_bytes)
        yield replace(
            least, num_gates=least.num_gates + gates, num_up_downs=least.num_up_downs + up_downs
        )


def _words_to_read_ahead(system: SystemConfig, config: ModelConfig) -> int:
    """Words of predictors that can read neurons ahead; 0 without such."""
    if not system.predictors_path:
        return 0
    file, identity = Path(system.predictors_path), ModelIdentity.of(system.model_path)
    return words_to_read_ahead(read_predictors(file, identity, config))


def _shares_bits(system: SystemConfig, num_words: int) -> bool:
    """Whether services can read ahead by bits in the arena: one host, enough shared memory."""
    if not system.shares_arena:
        return False
    return _SHARED_BYTES_LEFT + num_words * WORD_BYTES <= free_shared_memory()


def _own_predictor_bytes(storage: NeuronStorage) -> int:
    """Predictor bytes in the services' own memory."""
    if not storage.predictors:
        return 0
    return Path(storage.predictors).stat().st_size - storage.predictor_words * WORD_BYTES


def token_reads(
    profile: ActivationProfile | None,
    system: SystemConfig,
    config: ModelConfig,
    kept: NeuronStorage,
) -> Reads:
    """What a token reads from storage, by the profile or `_UNKNOWN_RATE`. Errors: ArtifactError.

    Of experts by the profile, or by how often others found them chosen again.
    """
    geometry = BundleGeometry.of(config)
    if config.experts is not None:
        return _expert_reads(profile, system, config, kept)
    fired = _cold_rates(profile, system, config)
    if not fired.size:
        return Reads(0, 0)
    resident = Resident(geometry, kept.num_gates, kept.num_up_downs)
    if system.predictors_path or kept.num_gates >= fired.size:
        is_whole = bool(system.predictors_path) and reads_whole(fired, resident)
        return whole_bundles(fired, resident) if is_whole else gates_first(fired, resident)
    # Gates of all neurons outside of slots, and the bytes between them.
    ones, num_bytes = np.ones_like(fired), geometry.bundle_bytes
    return expected_reads(ones, kept.num_up_downs, num_bytes, in_sequence=True)


def _expert_reads(
    profile: ActivationProfile | None,
    system: SystemConfig,
    config: ModelConfig,
    kept: NeuronStorage,
) -> Reads:
    """`token_reads` of whole experts, of which those that were used most of late are in memory.

    What a GPU holds counts as if it were in slots.
    """
    assert config.experts is not None
    router, size = config.experts.router, config.experts.size
    layers = routed_layers(config)
    more = more_slot_neurons(system, config, len(layers))
    outside = num_cold_neurons(system, config) + more - kept.num_up_downs
    num_slots = config.num_experts - outside / (size + more / config.num_experts)
    distances = None if profile is None else profile.known_distances
    if distances is not None:
        share = missed_share(distances, num_slots)
    else:
        missed = missed_experts(num_slots / len(layers), router.num_experts, router.num_chosen)
        share = missed / router.num_chosen
    of_expert = _mean_expert(system, config, layers)
    return expert_reads(share, len(layers), router.num_chosen, of_expert)


def routed_layers(config: ModelConfig) -> list[int]:
    """The layers that have experts."""
    return [at for at, layer in enumerate(config.layers) if layer.ffn.router is not None]


def _mean_expert(system: SystemConfig, config: ModelConfig, layers: Sequence[int]) -> Reads:
    """Reads of a whole expert, the mean of these layers."""
    assert config.experts is not None
    geometry, number, num_bytes = BundleGeometry.of(config), 0.0, 0.0
    readers = _readers_of_down(system, config) if geometry.has_outputs else 1
    for layer in layers:
        num_bundles = geometry.blocks[layer][0].num_bundles
        first, second = geometry.part_bytes(layer)
        number += num_bundles
        num_bytes += num_bundles * (first + second * readers)
    return Reads(number / len(layers), num_bytes / len(layers))


def _expert_shares(system: SystemConfig, config: ModelConfig) -> np.ndarray:
    """Neurons of an expert that services have, where down is a row an output: (services, turns).

    Experts take turns: with which stripe one begins.
    """
    assert config.experts is not None
    stripes = output_stripes(config, service_threads(system), system.expert_pieces)
    shares = np.zeros((len(stripes), stripes[0].total), np.int64)
    for service, own in enumerate(stripes):
        for block, stripe in product(range(own.total), range(own.first, own.end)):
            first, end = output_run(config.experts.size, block, stripe, own)
            shares[service, block] += end - first
    return shares


def _readers_of_down(system: SystemConfig, config: ModelConfig) -> float:
    """How many services of a host read an expert's down rows, where a row is an output: the mean.

    All that have a piece of it read whole rows.
    """
    readers = (_expert_shares(system, config) > 0).sum(axis=0).mean()
    return max(1.0, float(readers) / system.num_hosts)


def more_slot_neurons(system: SystemConfig, config: ModelConfig, num_layers: int) -> int:
    """Neurons for which the slots of all experts of so many layers have place beyond theirs.

    A service's runs of neurons, where down is a row an output, differ from expert to expert, and
    its slots are as large as the longest. 0 where that is not so.
    """
    if config.experts is None or not config.block_formats:
        return 0
    experts = config.experts
    more = int(_expert_shares(system, config).max(axis=1).sum()) - experts.size
    return num_layers * experts.router.num_experts * more


def _cold_rates(
    profile: ActivationProfile | None, system: SystemConfig, config: ModelConfig
) -> np.ndarray:
    """Firing rates of the neurons that CPU services hold: (cold neurons of all layers,)."""
    unknown = np.full((config.num_layers, config.largest_ffn), _UNKNOWN_RATE)
    fired = unknown if profile is None else profile.frequency
    is_cold = np.arange(fired.shape[1]) < np.array(config.ffn_sizes)[:, None]
    hot = hot_neurons(system, config, None) if system.device == "cuda" else None
    for layer, ids in enumerate(hot or []):
        is_cold[layer, ids] = False
    cold: np.ndarray = fired[is_cold]
    return cold


def reads_whole(fired: np.ndarray, resident: Resident) -> bool:
    """Whether reading a listed neuron's whole bundle at once beats reading its gate first.

    `fired` are firing rates, (0,) if unknown. Gates first pays where a listed neuron seldom fires.
    A 4-bit bundle is never read whole: up and down rows take twice as long as the gate.
    """
    geometry, disk = resident.geometry, Disk()
    row_format = ROW_FORMATS.get(numpy_dtype(geometry.gate_dtype))
    if row_format is not None and row_format.bits <= 4:
        return False
    if not fired.size:
        fired = np.full(geometry.num_bundles, _UNKNOWN_RATE)
    at_once, in_turn = whole_bundles(fired, resident), gates_first(fired, resident)
    return disk.seconds(at_once) <= disk.seconds(in_turn)


def slot_bytes(geometry: BundleGeometry) -> tuple[int, int]:
    """Bytes of a slot for a gate row, and of a slot for up and down rows, tables included."""
    return geometry.gate_row_bytes + _SLOT_BYTES, geometry.up_down_row_bytes + _SLOT_BYTES


def bytes_in_memory(config: ModelConfig, storage: NeuronStorage) -> int:
    """Bytes of cold neurons' rows in memory."""
    gate_bytes, up_down_bytes = slot_bytes(BundleGeometry.of(config))
    return storage.num_gates * gate_bytes + storage.num_up_downs * up_down_bytes


def offloaded_ffn_bytes(system: SystemConfig, config: ModelConfig, storage: NeuronStorage) -> int:
    """Memory of the offloaded FFN on all hosts: slots, kept gates, tables, read buffers."""
    geometry, services = BundleGeometry.of(config), system.num_cpu_actors
    tables = geometry.num_bundles * _ROW_BYTES + ffn_bytes(config, 0)  # down's biases
    if geometry.has_outputs:  # all services have all bundles
        tables += (services - 1) * geometry.num_bundles * _ROW_BYTES + geometry.more_bytes
        tables += services * sum(map(len, geometry.blocks)) * _UNIT_BYTES
    if geometry.is_mixture:
        tables += config.num_neurons * _EXPERT_NEURON_BYTES
        tables += int(config.num_neurons * predictor_bytes_a_neuron(config, services))
    buffers = services * RING_DEPTH * (READ_BYTES + geometry.bundle_bytes)
    predictors = _own_predictor_bytes(storage)
    return bytes_in_memory(config, storage) + tables + buffers + predictors
