"""A system's configuration from the user's options, with defaults filled in."""

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hotcold.actors.protocol.messages import (
    AUTO_MODE,
    MODES,
    PREDICTED_DRAFT,
    PREDICTED_MODES,
    THRESHOLD,
    SystemConfig,
)
from hotcold.actors.protocol.options import SystemOptions
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.actors.setup.drafting import with_draft
from hotcold.actors.setup.gpu_share import choose_device, neuron_upload_tokens, only_on_cpu
from hotcold.actors.setup.modes import auto_mode, require_predictable, thresholds_file
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import UsageError
from hotcold.model.files.artifact import ModelIdentity, check_artifact
from hotcold.model.files.locate import resolved_model
from hotcold.model.limits import num_cpus
from hotcold.placement.machine.numa import nodes_with_memory
from hotcold.placement.machine.survey import usable_cores
from hotcold.placement.machine.sysfs import (
    NumaNode,
    missing_features,
    read_cpu,
    read_numa_nodes,
)
from hotcold.predictors.powerinfer import checkpoint_predictors, has_predictors
from hotcold.predictors.predictor_file import predictors_path, write_predictors

# The folder of proc and sys, where tests have fake NUMA nodes.
NUMA_ROOT = "HOTCOLD_NUMA_ROOT"
_DEFAULT_CONTEXT, _DEFAULT_BATCH = 4096, 8
_MAX_KV_POSITIONS = 1 << 31
_CORES_OF_A_GPU = 2  # for its service and the driver, while CPU services wait for its flags


def choose_system(path: Path, config: ModelConfig, options: SystemOptions) -> SystemConfig:
    """Check the options and fill in defaults, for a model whose config is `config`.

    Who reads options has checked that each is one of its choices.

    Errors:  UsageError; ArtifactError for predictors or thresholds that are missing, damaged or
             another model's
    """
    _require_kernels()
    root = Path(os.environ.get(NUMA_ROOT, "/"))
    device = choose_device(options.device, options.gpu_memory_bytes, only_on_cpu(config))
    cores = usable_cores(root)
    spared = _CORES_OF_A_GPU if device == "cuda" and len(cores) > 2 * _CORES_OF_A_GPU else 0
    num_threads = within("--threads", options.num_threads, 1, num_cpus(root), len(cores) - spared)
    cores = usable_cores(root, num_threads)
    nodes = read_numa_nodes(root)
    num_nodes = len(nodes_with_memory(nodes, cores))
    num_hosts = max(1, len(options.hosts))
    num_actors = num_hosts * max(1, min(num_nodes, num_threads))
    most_actors = num_hosts * num_threads
    is_auto = options.mode == AUTO_MODE
    tried = auto_mode(path, config, options.weight_dtype or "") if is_auto else options.mode
    mode = tried or default_mode(config)
    context = _context(config, options.context_length)
    system = SystemConfig(
        model_path=str(resolved_model(path)),
        mode=mode,
        num_cpu_actors=within("--cpu-actors", options.num_cpu_actors, 1, most_actors, num_actors),
        num_threads=num_threads,
        context_length=context,
        max_batch=within("--parallel", options.max_batch, 1, KERNEL_TOKENS, _DEFAULT_BATCH),
        kv_positions=_kv_positions(options.kv_positions, context),
        kv_dtype=options.kv_dtype or _default_kv_dtype(config),
        prefix_cache_bytes=_prefix_cache(options.prefix_cache_bytes),
        exchange=options.exchange,
        speculate=options.speculate,
        predictors_path=_predictors(path, config, mode, options),
        auto_mode=is_auto,
        expert_pieces=_expert_pieces(nodes),
        thresholds_path=thresholds_file(path, config, mode, options.thresholds),
        has_down_norms=mode == THRESHOLD,
        weight_dtype=options.weight_dtype or "",
        pin=options.pin,
        hosts=options.hosts,
        numa_root=str(root),
        device=device,
        requires_gpu=options.device == "cuda" or bool(options.gpu_memory_bytes),
        gpu_memory_bytes=options.gpu_memory_bytes or 0,
    )
    system = replace(system, neuron_upload_tokens=neuron_upload_tokens(system, config))
    system = with_draft(path, system, config, options)
    _require_possible(system)
    return system


def _require_possible(system: SystemConfig) -> None:
    """Raise UsageError for options that cannot be had together."""
    _check_hosts(system)
    if system.kv_dtype == "q8" and system.device == "cuda":
        raise UsageError(
            "--kv-dtype q8 is for the CPU, and attention would be on the GPU; give --device cpu "
            "or --kv-dtype float16"
        )
    if system.device == "cuda" and system.prefix_cache_bytes:
        raise UsageError(
            "--prefix-cache with a size keeps pages of the KV cache in memory of the CPU, not of a "
            "GPU; leave it out, or give --device cpu"
        )
    if system.hosts and system.prefix_cache_bytes:
        raise UsageError(
            "--prefix-cache with a size is for one computer: pages that other hosts had a part in "
            "may differ after a change there; leave it out, or leave out --hosts"
        )


def require_one_mode(options: SystemOptions) -> None:
    """Raise UsageError for `--mode auto` in a command that measures one mode."""
    if options.mode == AUTO_MODE:
        raise UsageError(
            f"--mode {AUTO_MODE} chooses by itself, and here a mode is measured; give one of "
            f"{', '.join(MODES)}"
        )


def default_mode(config: ModelConfig) -> str:
    """The mode without --mode: `exact` skips nothing where no activation is exactly zero."""
    return "exact" if config.is_sparse else "dense"


def _expert_pieces(nodes: Sequence[NumaNode]) -> int:
    """How many pieces experts are cut in at least, where down rows are an output each.

    Where each NUMA node has its own memory, services of two share every choice of experts evenly;
    on a machine with one memory pieces would only cost time. They change a token's last bits, so
    this machine decides, not the number of services, threads or hosts.
    """
    return 2 if sum(bool(node.cores and node.total_bytes) for node in nodes) > 1 else 1


def _check_hosts(system: SystemConfig) -> None:
    if len(set(system.hosts)) < len(system.hosts):
        raise UsageError("--hosts names a host twice; give each address once")
    if system.hosts and system.num_cpu_actors % len(system.hosts):
        raise UsageError(
            f"--cpu-actors is {system.num_cpu_actors}, and --hosts names {len(system.hosts)} "
            "hosts, which share them equally; give a multiple of that"
        )


def _require_kernels() -> None:
    """Raise UsageError for a CPU that kernels cannot be compiled for; LLVM would abort."""
    if missing := missing_features(read_cpu(), platform.machine()):
        raise UsageError(
            f"this CPU has no {', '.join(missing)}, which hotcold's kernels need; use one with "
            "AVX2, FMA and F16C (Intel from 2013, AMD from 2015 on)"
        )


def _predictors(path: Path, config: ModelConfig, mode: str, options: SystemOptions) -> str:
    """The checked predictors file of a predicted mode; "" in other modes.

    Low-rank predictors that lie in the checkpoint are written to one first.
    """
    if mode not in PREDICTED_MODES:
        if options.predictors is not None and options.draft != PREDICTED_DRAFT:
            raise UsageError(
                f"--predictors go with --mode {' or '.join(PREDICTED_MODES)}, not with {mode}"
            )
        return ""
    require_predictable(config, f"--mode {mode}")
    found = options.predictors or predictors_path(path, mode, options.weight_dtype or "")
    identity = ModelIdentity.of(path)
    is_wanted = options.predictors is None and mode == "lowrank" and not found.exists()
    if is_wanted and has_predictors(path, config):
        found = predictors_path(path, mode)  # for any weights
        write_predictors(found, identity, checkpoint_predictors(path, config))
    check_artifact(found, "predictors", identity)
    return str(found.resolve())


def _context(config: ModelConfig, length: int | None) -> int:
    if length is None:
        as_trained = [rope.changes_after for rope in config.ropes if rope.changes_after]
        return min(_DEFAULT_CONTEXT, config.max_positions, *as_trained)
    return within("--context", length, 2, config.max_positions, length)


def _kv_positions(number: int | None, context: int) -> int:
    """Positions of all requests together: at least one context, or some could never run."""
    if number is not None and number < context:
        raise UsageError(
            f"--kv-tokens is {number}, less than the context of {context} tokens; give at least "
            "that, or a smaller --context"
        )
    return within("--kv-tokens", number, 1, _MAX_KV_POSITIONS, context)


def _default_kv_dtype(config: ModelConfig) -> str:
    """float32 for a float32 model, else float16, which is as precise as the weights.

    float16 ends at 65504, unlike bfloat16: a model with larger keys or values needs float32.
    """
    return "float32" if config.dtype == "float32" else "float16"


def _prefix_cache(num_bytes: int | None) -> int | None:
    """The file's size; 0 for "off", None where it was not given."""
    if num_bytes is not None and num_bytes < 0:
        raise UsageError(f"--prefix-cache is {num_bytes}; give a size like 20GiB, or off")
    return num_bytes


def within(option: str, value: int | None, low: int, high: int, default: int) -> int:
    """The value of an option; without one the default. Errors: UsageError."""
    if value is None:
        return default
    if not low <= value <= high:
        raise UsageError(f"{option} is {value}; give a number from {low} to {high}")
    return value
