"""Which service a process loads: the work of a GPU service, or one of three kinds of neurons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hotcold.actors.exchange.service import Service
from hotcold.actors.protocol.messages import ServiceSpec
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.setup.host_files import own_predictors
from hotcold.actors.setup.storage import offloaded_share
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.weights.check import stored_config
from hotcold.placement.machine.first_touch import FirstTouch

# Reads a service's own part of the checkpoint; is told of bytes as they are read.
Loader = Callable[[Callable[[int], None]], Service]


def service_loader(spec: ServiceSpec, config: ModelConfig, touch: FirstTouch | None) -> Loader:
    """What loads the service that computes on the CPU; `config` is the model's, as stored.

    `touch` says how new matrices are spread over NUMA nodes. Only what the service needs is
    imported.
    Errors:  HotcoldError
    """
    if spec.cache is not None:
        return _attention_loader(spec, config, touch)
    if spec.storage is not None:
        return _stored_loader(spec, config, spec.storage)
    if spec.down_transposed:
        return _dense_loader(spec, config, touch)
    return _cold_loader(spec, config, touch)


def _attention_loader(spec: ServiceSpec, config: ModelConfig, touch: FirstTouch | None) -> Loader:
    from hotcold.actors.attention.attention_service import load_gpu_service

    cache = spec.cache
    assert cache is not None
    return lambda on_bytes: load_gpu_service(
        Path(spec.model_path),
        config,
        spec.index,
        spec.num_threads,
        cache,
        on_bytes,
        spec.weight_dtype,
        touch,
        spec.neuron_ids,
        spec.has_down_norms,
        keeps_pages=spec.storage is None,
    )


def _cold_loader(spec: ServiceSpec, config: ModelConfig, touch: FirstTouch | None) -> Loader:
    from hotcold.actors.cpu.cpu_service import load_cpu_service

    return lambda on_bytes: load_cpu_service(
        Path(spec.model_path),
        config,
        spec.index,
        spec.num_threads,
        spec.neuron_ids or [],
        spec.index == 1,
        on_bytes,
        spec.weight_dtype,
        touch,
        spec.has_down_norms,
    )


def _dense_loader(spec: ServiceSpec, config: ModelConfig, touch: FirstTouch | None) -> Loader:
    from hotcold.actors.cpu.dense_service import load_dense_service

    assert spec.neuron_ids is not None
    neurons = spec.neuron_ids[0]
    return lambda on_bytes: load_dense_service(
        Path(spec.model_path),
        config,
        spec.index,
        spec.num_threads,
        neurons,
        spec.index == 1,
        on_bytes,
        touch,
        spec.has_down_norms,
    )


def _stored_loader(spec: ServiceSpec, config: ModelConfig, storage: NeuronStorage) -> Loader:
    from hotcold.actors.cpu.offloaded_service import load_offloaded_service

    path = Path(spec.model_path)
    share = offloaded_share(spec, stored_config(Checkpoint(path), config, spec.weight_dtype))
    return lambda on_bytes: load_offloaded_service(
        path,
        config,
        spec.index,
        spec.num_threads,
        spec.neuron_ids or [],
        spec.index == 1,
        on_bytes,
        Path(storage.path),
        share,
        spec.weight_dtype,
        own_predictors(spec),
        spec.has_down_norms,
        spec.among,
    )
