"""What the bits of the KV cache depend on beside the tokens: two systems of one identity agree."""

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.registry import cpu_target

from hotcold.actors.cpu.matmul import matmul_features
from hotcold.actors.protocol.messages import LAYER_DRAFT, ServicePart, ServiceSpec, SystemConfig
from hotcold.actors.protocol.topology import Topology
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.files.artifact import ModelIdentity, sampled_digest
from hotcold.model.weights.rope_frequencies import inv_freq
from hotcold.placement.machine.sysfs import read_cpu

# Options of a system that change what its services compute, or with what.
_OPTIONS = (
    "mode",
    "kv_dtype",
    "weight_dtype",
    "device",
    "num_hot_neurons",
    "num_host_layers",
    "neuron_upload_tokens",
    "gpu_predicts",
    "down_transposed",
    "expert_pieces",
    "has_down_norms",
)
_ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("actors", "cuda_kernels", "model", "numba_kernels")
_LIBRARIES = ("numba", "llvmlite", "numpy", "cupy-cuda12x", "cupy-cuda13x", "cupy")


def arithmetic_identity(
    system: SystemConfig,
    config: ModelConfig,
    topology: Topology,
    share_tokens: int,
    model: str = "",
    machines: Mapping[str, Any] | None = None,
) -> bytes:
    """32 bytes that are equal only where the same tokens give the same KV cache, to the last bit.

    They tell apart: the model's files, formats of weights and of the KV cache, the mode, services
    with attention and their hot neurons, the CPU, sources, libraries, cuts of prompts
    (`share_tokens`), and which frequencies ropes have for the context. `model`: a digest of the
    model in place of its files' state. Not CPU services and threads, which change no bit, unless
    they are on one of `machines`, other hosts with their `machine_arithmetic`, that is not like
    this one; no GPU: a store is refused beside one.
    Errors:  ConfigError, CheckpointError
    """
    digest = hashlib.blake2b(digest_size=32)
    options, own = asdict(system), machine_arithmetic(system.numa_root)
    facts = {
        **own,
        "model": model or _model(system, topology),
        "config": repr(config),
        "options": [options[name] for name in _OPTIONS],
        "thresholds": _file_digest(system.thresholds_path),
        "predictors": _sampled_digest(system.predictors_path),
        "is_stored": system.storage is not None,
        "has_draft_layer": system.draft == LAYER_DRAFT,
        "ropes": _ropes(config, system.context_length),
        "share_tokens": share_tokens,
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for part in topology.parts:
        machine = (machines or {}).get(part.host, own)
        if not part.is_cpu_service or machine != own:
            _add_service(digest, part, machine)
    return digest.digest()


def machine_arithmetic(numa_root: str) -> dict[str, Any]:
    """What the bits of this host's services depend on: its CPU, the build, libraries."""
    return {
        "cpu": [_compiled_for(), asdict(read_cpu(Path(numa_root)))],
        "instructions": sorted(matmul_features()),
        "sources": [_version("hotcold"), _sources()],
        "libraries": [_version(name) for name in _LIBRARIES],
    }


def _compiled_for() -> list[str]:
    """The CPU that kernels are compiled for, by LLVM's names; see `has_feature`."""
    codegen = cpu_target.target_context.codegen()  # no public names for these
    return [str(codegen._get_host_cpu_name()), str(codegen._tm_features)]


def _model(system: SystemConfig, topology: Topology) -> str:
    """The digest that services of a running system check their files by."""
    digests = {part.model_digest for part in topology.parts if isinstance(part, ServiceSpec)}
    digests.discard("")
    return "".join(sorted(digests)) or ModelIdentity.of(system.model_path).state


def _add_service(digest: hashlib.blake2b, part: ServicePart, machine: dict[str, Any]) -> None:
    facts = [part.name, list(part.attention), part.has_head, part.has_down_bias, machine]
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    for ids in part.neuron_ids or ():
        digest.update(ids.size.to_bytes(8, "little"))
        digest.update(ids.tobytes())


@cache
def _file_digest(path: str) -> str:
    """Of a file as it was when the system started."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


@cache
def _sampled_digest(path: str) -> str:
    """The same of a large file, by its first part and size."""
    return sampled_digest(path)


def _ropes(config: ModelConfig, context_length: int) -> list[str]:
    """Digests of each rope's frequencies: torch computes them, unalike with other instructions."""
    return [
        hashlib.sha256(
            inv_freq(rope, config.rotated_head_dim(index), context_length).tobytes()
        ).hexdigest()
        for index, rope in enumerate(config.ropes)
    ]


@cache
def _sources() -> str:
    """A digest of what computes prompts."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h"):
                digest.update(path.relative_to(_ROOT).as_posix().encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
