"""Neurons on storage: how many are kept in memory within a budget, and the bundle file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from hotcold.actors.protocol.messages import ServiceSpec, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage, OffloadedShare
from hotcold.actors.setup.account import CUDA_BYTES, Account, in_memory_account, more_process_bytes
from hotcold.actors.setup.placement_choice import own_profile
from hotcold.actors.setup.storage_shares import (
    divided,
    more_slot_neurons,
    offloaded_ffn_bytes,
    reads_whole,
    resident_parts,
)
from hotcold.model.bundles.bundle_file import bundle_path, read_bundle_file
from hotcold.model.bundles.geometry import BundleGeometry
from hotcold.model.bundles.pack import OnBytes, write_bundles
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.files.artifact import ModelIdentity
from hotcold.placement.profile import ActivationProfile, rates_of
from hotcold.placement.storage import least_in_memory

_GIB = 1 << 30


def fit_storage(
    profile: ActivationProfile | None,
    need: Account,
    system: SystemConfig,
    config: ModelConfig,
    free_bytes: int,
) -> NeuronStorage | None:
    """How much of the FFN to keep in memory where `need` does not fit in `free_bytes`.

    Both are those of the driver's host, which needs most; the FFN is shared equally among hosts.
    None where offloading is not possible (a GPU with several hosts) or would not save memory.
    Errors:  MemoryBudgetError naming the least budget that would do
    """
    if system.device == "cuda" and system.hosts:
        return None
    if _least(need, system, config)[1] >= need.total_bytes:
        return None
    return storage_within(profile, need, system, config, free_bytes)


def storage_within(
    profile: ActivationProfile | None,
    need: Account,
    system: SystemConfig,
    config: ModelConfig,
    free_bytes: int,
) -> NeuronStorage:
    """`fit_storage` without its checks. Errors: MemoryBudgetError."""
    least, least_bytes = _least(need, system, config)
    num_hosts = max(1, len(system.hosts))
    if least_bytes > free_bytes:
        each = " on each host" if system.hosts else ""
        raise MemoryBudgetError(
            f"this model needs {binary_text(need.total_bytes)} of memory{each}, or at least "
            f"{binary_text(least_bytes)} ({least_bytes} bytes) with its neurons on storage, and "
            f"{binary_text(free_bytes)} are allowed; use --cpu-memory {_rounded_up(least_bytes)}"
        )
    return divided(profile, system, config, least, num_hosts * (free_bytes - least_bytes))


def storage_beside_gpu(system: SystemConfig, config: ModelConfig) -> NeuronStorage | None:
    """`system.storage` fitted again, now that the GPU's share is known.

    Unchanged without a budget. Errors: MemoryBudgetError naming the least budget that would do
    """
    storage = system.storage
    if storage is None or not storage.memory_bytes:
        return storage
    need = in_memory_account(system, config)
    if system.device == "cpu":  # the GPU was tried: its service keeps that memory
        need = replace(need, process_bytes=need.process_bytes + CUDA_BYTES)
    path, free = Path(system.model_path), storage.memory_bytes
    profile = own_profile(path, config)
    found = storage_within(profile, need, system, config, free)
    return replace(found, memory_bytes=free)


def _least(need: Account, system: SystemConfig, config: ModelConfig) -> tuple[NeuronStorage, int]:
    """The smallest storage: slots for one whole layer, and the memory that the host then needs.

    For a whole layer, as a GPU may turn out to hold few of its neurons.
    """
    geometry, num_hosts = BundleGeometry.of(config), max(1, len(system.hosts))
    file = bundle_path(system.model_path, geometry)  # absolute: the same on other hosts
    most = max(geometry.layer_bundles)
    if config.experts is not None:
        most = least_in_memory([layer.ffn for layer in config.layers])
        most += more_slot_neurons(system, config, 1)
    least = NeuronStorage(str(file), most, most)
    rest = need.total_bytes - need.ffn_bytes + more_process_bytes(system, config)
    return least, rest + -(-offloaded_ffn_bytes(system, config, least) // num_hosts)


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
    is_whole = reads_whole(geometry, rates, resident_parts(geometry, num_gates, num_up_downs))
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
