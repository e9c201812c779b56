"""How the memory of stored neurons is best used: for gates, for reading ahead, for slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from actors.protocol.messages import SystemConfig
from actors.protocol.stored_neurons import READ_BYTES, READ_THREADS, NeuronStorage
from actors.setup.placement_choice import own_profile
from model.bundles.geometry import BundleGeometry
from model.config.model_config import ModelConfig
from model.files.artifact import ModelIdentity
from placement.storage import Disk, Reads, expected_reads, listed_rates
from predictors.predictor_file import read_predictors
from predictors.read_ahead import can_read_ahead

_ROW_BYTES = 64  # of each neuron: where it is, its sums, biases, counts
_SLOT_BYTES = 24  # of each slot: whose it is, biases
_UNKNOWN_RATE = 0.1  # of neurons, where no profile says how often they fire
_LISTED = 2.0  # neurons that a predictor lists for one that fires
_SPARE_FOR_AHEAD = 4  # times as much as predictors take must be left for more slots


def divided(
    path: Path, system: SystemConfig, config: ModelConfig, least: NeuronStorage, spare: int
) -> NeuronStorage:
    """How `spare` bytes beside the least are best used. Errors: ArtifactError."""
    num_bytes = _predictor_bytes(path, system, config)
    if num_bytes and _SPARE_FOR_AHEAD * num_bytes < spare:
        least, spare = replace(least, predictors=system.predictors_path or ""), spare - num_bytes
    slots = replace(least, cache_bytes=least.cache_bytes + spare)
    gates, geometry = replace(least, has_gates=True), BundleGeometry.of(config)
    gates = replace(gates, cache_bytes=geometry.num_neurons * slot_bytes(geometry, gates))
    more = stored_bytes(system, config, gates) - stored_bytes(system, config, least)
    if system.mode == "dense" or more > spare:
        return slots
    gates = replace(gates, cache_bytes=gates.cache_bytes + spare - more)
    disk = Disk()
    found = (gates, slots)
    return min(found, key=lambda kept: disk.seconds(token_reads(path, system, config, kept)))


def _predictor_bytes(path: Path, system: SystemConfig, config: ModelConfig) -> int:
    """Of predictors by which neurons can be read ahead; 0 where there are none."""
    if not system.predictors_path:
        return 0
    file = Path(system.predictors_path)
    found = read_predictors(file, ModelIdentity.of(path), config)
    return file.stat().st_size if can_read_ahead(found) else 0


def token_reads(
    path: Path, system: SystemConfig, config: ModelConfig, kept: NeuronStorage
) -> Reads:
    """What a token reads, by the profile; as if a tenth of the neurons fired alike without one.

    Errors:  ArtifactError
    """
    geometry = BundleGeometry.of(config)
    profile = own_profile(path, ModelIdentity.of(path), config)
    unknown = np.full((config.num_layers, config.ffn_size), _UNKNOWN_RATE)
    fired = unknown if profile is None else profile.frequency
    num_slots = kept.cache_bytes // slot_bytes(geometry, kept)
    if kept.has_gates:
        return expected_reads(fired, num_slots, geometry.rest_bytes)
    if system.predictors_path:
        wanted = listed_rates(fired, _LISTED * float(fired.mean()))
        return expected_reads(wanted, num_slots, geometry.bundle_bytes)
    # Gates of all that are not in slots; what lies between them is read too.
    return expected_reads(np.ones_like(fired), num_slots, geometry.bundle_bytes, in_sequence=True)


def slot_bytes(geometry: BundleGeometry, storage: NeuronStorage) -> int:
    """Bytes of a slot with its tables."""
    return geometry.slot_bytes - storage.has_gates * geometry.gate_row_bytes + _SLOT_BYTES


def stored_bytes(system: SystemConfig, config: ModelConfig, storage: NeuronStorage) -> int:
    """What the FFN takes of memory: slots, gates that stay, tables, buffers of reads."""
    geometry = BundleGeometry.of(config)
    num_neurons = geometry.num_layers * geometry.num_neurons
    buffers = system.num_cpu_actors * READ_THREADS * (READ_BYTES + geometry.bundle_bytes)
    gates = num_neurons * geometry.gate_row_bytes if storage.has_gates else 0
    predictors = Path(storage.predictors).stat().st_size if storage.predictors else 0
    return storage.cache_bytes + gates + num_neurons * _ROW_BYTES + buffers + predictors
