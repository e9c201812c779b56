"""Neurons on storage: how many are kept in memory within a budget, and the bundle file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage, OffloadedShare
from hotcold.actors.setup.account import CUDA_BYTES, account, expected_gpu
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.actors.setup.storage_shares import (
    divided,
    more_slot_neurons,
    reads_whole,
)
from hotcold.model.bundles.bundle_file import bundle_path, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.bundles.pack import OnBytes, write_bundles
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import ActivationProfile, rates_of
from hotcold.placement.storage import Resident, least_in_memory

_GIB = 1 << 30


def fit_storage(
    profile: ActivationProfile | None,
    system: SystemConfig,
    config: ModelConfig,
    free_bytes: int,
    extra_bytes: int = 0,
) -> NeuronStorage | None:
    """How much of the FFN to keep in memory where the system does not fit in `free_bytes`.

    They are those of the driver's host, which needs most; the FFN is shared equally among hosts.
    `extra_bytes` of processes come on top of what the system takes.
    None where offloading is not possible (a GPU with several hosts) or would not save memory.
    Errors:  MemoryBudgetError naming the least budget that would do
    """
    if system.device == "cuda" and system.hosts:
        return None
    least = replace(system, storage=_least(system, config))
    if account(least, config).total_bytes >= _in_memory_bytes(system, config, 0):
        return None
    return storage_within(profile, system, config, free_bytes, extra_bytes)


def storage_within(
    profile: ActivationProfile | None,
    system: SystemConfig,
    config: ModelConfig,
    free_bytes: int,
    extra_bytes: int = 0,
) -> NeuronStorage:
    """`fit_storage` without its checks. Errors: MemoryBudgetError."""
    storage = _least(system, config)
    least = expected_gpu(replace(system, storage=storage), config)
    least_bytes = account(least, config, extra_bytes=extra_bytes).total_bytes
    if least_bytes > free_bytes:
        each = " on each host" if system.hosts else ""
        all_bytes = _in_memory_bytes(system, config, extra_bytes)
        raise MemoryBudgetError(
            f"this model needs {binary_text(all_bytes)} of memory{each}, or at least "
            f"{binary_text(least_bytes)} ({least_bytes} bytes) with its neurons on storage, and "
            f"{binary_text(free_bytes)} are allowed; use --cpu-memory {_rounded_up(least_bytes)}"
        )
    spare = system.num_hosts * (free_bytes - least_bytes)
    found = divided(profile, least, config, storage, spare)
    return replace(found, memory_bytes=free_bytes - extra_bytes)


def storage_beside_gpu(system: SystemConfig, config: ModelConfig) -> NeuronStorage | None:
    """`system.storage` fitted again, now that the GPU's share is known.

    Unchanged without a budget. Errors: MemoryBudgetError naming the least budget that would do
    """
    storage = system.storage
    if storage is None or not storage.memory_bytes:
        return storage
    # Where the GPU was tried in vain, its service keeps that memory.
    tried_bytes = CUDA_BYTES if system.device == "cpu" else 0
    profile = own_profile(Path(system.model_path), config)
    return storage_within(profile, system, config, storage.memory_bytes, tried_bytes)


def _in_memory_bytes(system: SystemConfig, config: ModelConfig, extra_bytes: int) -> int:
    """What the host needs with all cold neurons in memory."""
    in_memory = replace(system, storage=None)
    return account(in_memory, config, is_sure=True, extra_bytes=extra_bytes).total_bytes


def _least(system: SystemConfig, config: ModelConfig) -> NeuronStorage:
    """The smallest storage: slots for one whole layer, as a GPU may hold few of its neurons."""
    geometry = BundleGeometry.of(config)
    file = bundle_path(system.model_path, geometry)  # absolute: the same on other hosts
    most = max(geometry.layer_bundles)
    if config.experts is not None:
        most = least_in_memory(config)
        most += more_slot_neurons(system, config, 1)
    return NeuronStorage(str(file), most, most)


def _rounded_up(num_bytes: int) -> str:
    return f"{-(-num_bytes * 100 // _GIB) / 100:.2f}GiB"


def offloaded_share(spec: ServiceSpec, config: ModelConfig) -> OffloadedShare:
    """What a CPU service keeps in memory; `config` has the loaded dtypes. Errors: ArtifactError."""
    storage, shards = spec.storage, spec.neuron_ids or []
    if storage is None:
        raise ValueError(f"{spec.name} has no neurons on storage")
    geometry = BundleGeometry.of(config)
    most = max(ids.size for ids in shards)
    if geometry.is_mixture:
        most = 0
    num_gates, num_up_downs = max(most, storage.num_gates), max(most, storage.num_up_downs)
    path = spec.path
    profile = own_profile(path, config)
    rates = np.empty(0, np.float32)
    if profile is not None:
        wanted = rates_of(config, profile)
        every = wanted.fired if config.experts is None else wanted.chosen
        parts = [layer[ids] for layer, ids in zip(every, shards, strict=True)]
        rates = np.concatenate(parts).astype(np.float32)
    is_whole = reads_whole(rates, Resident(geometry, num_gates, num_up_downs))
    return OffloadedShare(num_gates, num_up_downs, rates, is_whole)


def pack_model(
    path: Path,
    config: ModelConfig,
    weight_dtype: str = "",
    on_bytes: OnBytes = lambda written, total: None,
    accept_existing: bool = False,
) -> Path:
    """Write the model's bundle file with the dtypes of `config`, as `write_bundles` does.

    With a profile beside the model, neurons that fire often come first.
    """
    profile = own_profile(path, config)
    order, name = _file_order(config, profile)
    return write_bundles(path, config, order, name, weight_dtype, on_bytes, accept_existing)


def _file_order(
    config: ModelConfig, profile: ActivationProfile | None
) -> tuple[list[np.ndarray], str]:
    geometry = BundleGeometry.of(config)
    if profile is None or geometry.is_mixture:
        return [np.arange(size, dtype=np.int32) for size in geometry.layer_bundles], "checkpoint"
    order = np.argsort(-profile.counts, axis=1, kind="stable")
    return list(order.astype(np.int32)), profile.digest


def has_bundles(path: Path, config: ModelConfig) -> bool:
    """Whether the bundle file is there. Errors: ArtifactError where it is not this model's."""
    geometry = BundleGeometry.of(config)
    file = bundle_path(path, geometry)
    if not file.exists():
        return False
    read_bundle_file(file, geometry, ModelIdentity.of(path))
    return True
