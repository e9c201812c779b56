"""What can be checked and chosen before anything is started: so that mistakes cost no waiting."""

import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from actors.protocol.messages import (
    AUTO_MODE,
    EXCHANGES,
    MODES,
    PREDICTED_MODES,
    THRESHOLD,
    SystemConfig,
)
from actors.protocol.options import SystemOptions
from actors.protocol.ray_memory import free_bytes, kept_bytes
from actors.protocol.step_sizes import KERNEL_TOKENS
from actors.protocol.stored_neurons import NeuronStorage
from actors.setup.auto_mode import auto_mode
from actors.setup.gpu_choice import (
    beside_gpu,
    beside_share,
    choose_device,
    expected_share,
    neuron_upload_tokens,
)
from actors.setup.placement_choice import find_plan
from actors.setup.shards import arena_layout, can_keep_outputs, num_kv_pages, served_config
from actors.setup.storage import fit_storage, has_bundles, more_process_bytes, storage_within
from actors.setup.storage_shares import bytes_in_memory, stored_bytes
from actors.setup.threshold_mode import thresholds_file
from model.config.build import read_config
from model.config.model_config import ModelConfig
from model.config.weight_formats import QUANTIZED_NAMES
from model.errors import UsageError
from model.files.artifact import ModelIdentity, check_artifact
from model.files.checkpoint import Checkpoint
from model.files.locate import resolved_model
from model.sampling import eos_ids
from model.weights.check import check_tensors, stored_config
from model.weights.sizes import ffn_bytes
from numba_kernels.decode.attention import PAGE_POSITIONS
from placement.machine.survey import usable_cores
from placement.machine.sysfs import missing_features, read_cpu, read_numa_nodes
from placement.memory import MemoryNeed, memory_need, require_memory, weight_bytes
from placement.threads.numa import nodes_with_memory
from predictors.in_checkpoint import checkpoint_predictors, has_predictors
from predictors.predictor_file import predictors_path, write_predictors

# Below which proc and sys tell of NUMA nodes; tests have fake ones there.
NUMA_ROOT = "HOTCOLD_NUMA_ROOT"
_DEFAULT_CONTEXT, _DEFAULT_BATCH = 4096, 8
_MOST_KV_POSITIONS = 1 << 31
_KV_ITEM_BYTES = {"float16": 2, "float32": 4}


def prepare_system(
    path: Path, options: SystemOptions, extra_bytes: int = 0
) -> tuple[SystemConfig, ModelConfig]:
    """Check the model's files, the options and the memory; fill in what was left open.

    The config's dtype is the one that matrices are loaded in. Where --cpu-memory, of each host, is
    less than the system takes there, and `extra_bytes` besides, its neurons stay on storage.
    Errors:  ConfigError, CheckpointError, UsageError, MemoryBudgetError, ArtifactError
    """
    config = read_model(path, options.weight_dtype)
    system = choose_system(path, config, options)
    has_plan = options.plan is not None
    served = in_memory(path, system, config, has_plan)
    if not _fits(path, *served, options, extra_bytes):
        # Neurons on their way to a GPU take room; stored ones are multiplied where they are read.
        system = replace(system, neuron_upload_tokens=0)
        served = in_memory(path, system, config, has_plan)
    if not _fits(path, *served, options, extra_bytes):
        storage = _storage(path, system, config, options, extra_bytes)
        if storage is not None:
            return replace(system, storage=storage), config
    system, config = served
    check_memory(path, system, config, options, extra_bytes)
    if system.down_by_outputs:  # services hold runs of neurons, all alike
        return system, config
    return replace(system, plan_path=_plan(path, system, config, options)), config


def in_memory(
    path: Path, system: SystemConfig, config: ModelConfig, has_plan: bool = False
) -> tuple[SystemConfig, ModelConfig]:
    """A chosen system, and the config with the formats that it holds matrices in, all in memory.

    `has_plan`: --plan names one, so down projections are by neurons, which it places.
    Errors:  CheckpointError, UsageError
    """
    checkpoint = Checkpoint(path)
    keeps = not has_plan and can_keep_outputs(system, checkpoint, config)
    system = replace(system, down_by_outputs=keeps)
    return system, served_config(system, checkpoint, config)


def _plan(path: Path, system: SystemConfig, config: ModelConfig, options: SystemOptions) -> str:
    budgets = options.gpu_memory_bytes, options.cpu_memory_bytes
    return find_plan(path, system, config, *budgets, options.plan)


def _fits(
    path: Path,
    system: SystemConfig,
    config: ModelConfig,
    options: SystemOptions,
    extra_bytes: int,
) -> bool:
    """Whether all of the system is within --cpu-memory and what is free; so too without a limit.

    What a GPU takes beside weights is counted, unless a plan says what it holds.
    """
    limit = options.cpu_memory_bytes
    if limit is None:
        return True
    need, has_plan = system_need(system, config), options.plan is not None
    if system.device == "cuda" and not (has_plan or _plan(path, system, config, options)):
        need = memory_beside_gpu(system, config)
    return need.total_bytes + extra_bytes <= min(limit, free_bytes())


def read_model(path: Path, weight_dtype: str | None = None) -> ModelConfig:
    """Check the model's files without reading weights.

    The config's dtype is the one that matrices are loaded in: `weight_dtype`, else as stored.
    Errors:  ConfigError, CheckpointError; UsageError for a dtype that cannot be had
    """
    config = read_config(path)
    checkpoint = Checkpoint(path)
    check_tensors(checkpoint, config)
    eos_ids(path, config)
    return stored_config(checkpoint, config, weight_dtype or "")


def check_memory(
    path: Path,
    system: SystemConfig,
    config: ModelConfig,
    options: SystemOptions,
    extra_bytes: int = 0,
) -> None:
    """Compare what the system, and `extra_bytes` besides, takes with what is free or allowed.

    Errors:  MemoryBudgetError, naming the --dtype that fits if there is one
    """

    def with_extra(need: MemoryNeed) -> MemoryNeed:
        return replace(need, process_bytes=need.process_bytes + extra_bytes)

    require_memory(
        with_extra(system_need(system, config)),
        options.cpu_memory_bytes,
        ((dtype, with_extra(need)) for dtype, need in _quantized_needs(path, options)),
        kept_bytes(),
    )


def _storage(
    path: Path,
    system: SystemConfig,
    config: ModelConfig,
    options: SystemOptions,
    extra_bytes: int,
) -> NeuronStorage | None:
    """What stays in memory under a --cpu-memory that is too little for all; None: nothing can."""
    assert options.cpu_memory_bytes is not None
    free = min(options.cpu_memory_bytes, free_bytes())
    share = expected_gpu(system, config)
    need = memory_beside_gpu(share, config)
    need = replace(need, process_bytes=need.process_bytes + extra_bytes)
    found = fit_storage(path, need, share, config, free)
    if found is not None and options.plan is not None:
        raise UsageError("--plan places neurons in memory; leave it out, or give more --cpu-memory")
    if found is None:
        return None
    has_bundles(path, config)
    return replace(found, memory_bytes=free - extra_bytes)


def choose_system(path: Path, config: ModelConfig, options: SystemOptions) -> SystemConfig:
    """Check the options and fill in what was left open, for the model of `read_model`.

    Errors:  UsageError; ArtifactError for predictors or thresholds that are missing, damaged or
             another model's
    """
    _require_kernels()
    root = Path(os.environ.get(NUMA_ROOT, "/"))
    cores = usable_cores(root)
    num_threads = _within("--threads", options.num_threads, 1, len(cores), len(cores))
    num_nodes = len(nodes_with_memory(read_numa_nodes(root), cores))
    num_hosts = max(1, len(options.hosts))
    num_actors = num_hosts * max(1, min(num_nodes, num_threads))
    most_actors = num_hosts * num_threads
    is_auto = options.mode == AUTO_MODE
    tried = auto_mode(path, config, options.weight_dtype or "") if is_auto else options.mode
    mode = _mode(config, tried)
    context = _context(config, options.context_length)
    system = SystemConfig(
        model_path=str(resolved_model(path)),
        mode=mode,
        num_cpu_actors=_within("--cpu-actors", options.num_cpu_actors, 1, most_actors, num_actors),
        num_threads=num_threads,
        context_length=context,
        max_batch=_within("--parallel", options.max_batch, 1, KERNEL_TOKENS, _DEFAULT_BATCH),
        kv_positions=_kv_positions(options.kv_positions, context),
        kv_dtype=_kv_dtype(config, options.kv_dtype),
        exchange=options.exchange,
        predictors_path=_predictors(path, config, mode, options),
        auto_mode=is_auto,
        thresholds_path=thresholds_file(path, config, mode, options.thresholds),
        has_down_norms=mode == THRESHOLD,
        weight_dtype=options.weight_dtype or "",
        pin=options.pin,
        hosts=options.hosts,
        numa_root=str(root),
        device=choose_device(options.device, options.gpu_memory_bytes),
        requires_gpu=options.device == "cuda" or bool(options.gpu_memory_bytes),
        gpu_memory_bytes=options.gpu_memory_bytes or 0,
    )
    tokens = neuron_upload_tokens(system.device, system.exchange, system.hosts)
    system = replace(system, neuron_upload_tokens=tokens)
    _check_hosts(system)
    if options.exchange not in EXCHANGES:
        raise UsageError(f"no exchange named {options.exchange!r}; give {' or '.join(EXCHANGES)}")
    return system


def require_one_mode(options: SystemOptions) -> None:
    """Raise UsageError for `--mode auto`, where modes are measured one by one."""
    if options.mode == AUTO_MODE:
        raise UsageError(
            f"--mode {AUTO_MODE} chooses by itself, and here a mode is measured; give one of "
            f"{', '.join(MODES)}"
        )


def storage_beside_gpu(system: SystemConfig, config: ModelConfig) -> NeuronStorage | None:
    """How much of the FFN stays in memory, now that it is known what the GPU of `system` holds.

    As before where nothing was promised. Errors: MemoryBudgetError naming the least that would do
    """
    storage = system.storage
    if storage is None or not storage.memory_bytes:
        return storage
    need = memory_beside_gpu(system, config)
    path, free = Path(system.model_path), storage.memory_bytes
    found = storage_within(path, need, system, config, free)
    return replace(found, memory_bytes=free, without=storage.without)


def system_need(system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """What the system will take of memory; of several hosts that of the driver's, the most."""
    if system.storage is not None:
        share = expected_gpu(system, config)
        need = beside_share(_whole_need(system, config), share, config)
        need = replace(
            need,
            ffn_bytes=stored_bytes(share, config, system.storage),
            process_bytes=need.process_bytes + more_process_bytes(share, config),
        )
        return _of_one_host(need, system)
    need = _whole_need(system, config)
    if system.device == "cuda":
        need = beside_gpu(need, system.gpu_memory_bytes)
    return _of_one_host(need, system)


def loaded_bytes(system: SystemConfig, config: ModelConfig) -> int:
    """Bytes of weights that its services load: on a GPU, and of stored neurons those in memory."""
    if system.storage is None:
        return weight_bytes(config)
    share = expected_gpu(system, config)
    kept = bytes_in_memory(share, config, system.storage)
    return weight_bytes(config, kept + ffn_bytes(config, max(0, share.num_hot_neurons)))


def memory_beside_gpu(system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """The same with all cold neurons in memory, and as much on a GPU as surely fits there."""
    need = beside_share(_whole_need(system, config), expected_gpu(system, config), config)
    return _of_one_host(need, system)


def expected_gpu(system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """The system with what its GPU holds, or surely will, where neurons are on storage."""
    return expected_share(_whole_need(system, config), system, config)


def _of_one_host(need: MemoryNeed, system: SystemConfig) -> MemoryNeed:
    """Services on other hosts look at their own memory (`actors/setup/host_files.py`)."""
    return replace(need, ffn_bytes=-(-need.ffn_bytes // max(1, len(system.hosts))))


def _whole_need(system: SystemConfig, config: ModelConfig) -> MemoryNeed:
    """What the driver's host takes, and its GPU, with all hosts' neurons there."""
    num_hosts = max(1, len(system.hosts))  # which share the CPU services equally
    num_processes = 2 + system.num_cpu_actors // num_hosts  # driver, GPU service, CPU services
    # Exchanging by calls, every process has an arena of its own.
    num_arenas = 1 if system.exchange == "arena" else num_processes
    return memory_need(
        config,
        num_kv_pages(system) * PAGE_POSITIONS,
        _KV_ITEM_BYTES[system.kv_dtype],
        num_processes,
        num_arenas * arena_layout(system, config).num_bytes,
        Path(system.predictors_path).stat().st_size if system.predictors_path else 0,
    )


def _check_hosts(system: SystemConfig) -> None:
    if len(set(system.hosts)) < len(system.hosts):
        raise UsageError("--hosts names a host twice; give each address once")
    if system.hosts and system.num_cpu_actors % len(system.hosts):
        raise UsageError(
            f"--cpu-actors is {system.num_cpu_actors}, and --hosts names {len(system.hosts)} "
            "hosts, which share them equally; give a multiple of that"
        )


def _quantized_needs(path: Path, options: SystemOptions) -> Iterator[tuple[str, MemoryNeed]]:
    """What each --dtype that takes less would need, the most precise first."""
    casts = ("f16",) if read_model(path).dtype == "float32" else ()
    for dtype in (*casts, *QUANTIZED_NAMES):
        try:
            config = read_model(path, dtype)
        except UsageError:  # rows that are no whole groups, or quantized otherwise already
            continue
        system = choose_system(path, config, replace(options, weight_dtype=dtype))
        yield dtype, system_need(system, config)


def _require_kernels(root: Path = Path("/")) -> None:
    """Refuse a CPU that kernels cannot be compiled for; LLVM would end the process."""
    if missing := missing_features(read_cpu(root), platform.machine()):
        raise UsageError(
            f"this CPU has no {', '.join(missing)}, which hotcold's kernels need; use one with "
            "AVX2, FMA and F16C (Intel from 2013, AMD from 2015 on)"
        )


def default_mode(config: ModelConfig) -> str:
    """The mode where none is asked for: `exact` skips nothing where no activation is zero."""
    return "exact" if config.is_sparse else "dense"


def _mode(config: ModelConfig, mode: str | None) -> str:
    if mode is None:
        return default_mode(config)
    if mode not in MODES:
        raise UsageError(f"no mode named {mode!r}; give {' or '.join(MODES)}")
    return mode


def _predictors(path: Path, config: ModelConfig, mode: str, options: SystemOptions) -> str:
    """The predictors' file of a predicted mode, found to be this model's; no other mode has one.

    Where there is none, low-rank predictors that lie in the checkpoint become one.
    """
    if mode not in PREDICTED_MODES:
        if options.predictors is not None:
            raise UsageError(
                f"--predictors go with --mode {' or '.join(PREDICTED_MODES)}, not with {mode}"
            )
        return ""
    own = predictors_path(path, mode, options.weight_dtype or "")  # made for these weights
    found = options.predictors or (own if own.exists() else predictors_path(path, mode))
    identity = ModelIdentity.of(path)
    is_wanted = options.predictors is None and mode == "lowrank" and not found.exists()
    if is_wanted and has_predictors(path, config):
        write_predictors(found, identity, checkpoint_predictors(path, config))
    check_artifact(found, "predictors", identity)
    return str(found.resolve())


def _context(config: ModelConfig, length: int | None) -> int:
    if length is None:
        return min(_DEFAULT_CONTEXT, config.max_positions)
    return _within("--context", length, 2, config.max_positions, length)


def _kv_positions(number: int | None, context: int) -> int:
    """Positions of all requests together: a whole context at least, or some could never run."""
    if number is not None and number < context:
        raise UsageError(
            f"--kv-tokens is {number}, less than the context of {context} tokens; give at least "
            "that, or a smaller --context"
        )
    return _within("--kv-tokens", number, 1, _MOST_KV_POSITIONS, context)


def _kv_dtype(config: ModelConfig, dtype: str | None) -> str:
    """float32 keeps a float32 model's results; others take float16, as precise as their weights.

    float16 ends at 65504, where bfloat16 goes on: keys or values beyond it would become infinite,
    and such a model needs float32.
    """
    if dtype is None:
        return "float32" if config.dtype == "float32" else "float16"
    if dtype not in _KV_ITEM_BYTES:
        raise UsageError(f"no KV cache format {dtype!r}; give {' or '.join(_KV_ITEM_BYTES)}")
    return dtype


def _within(option: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is None:
        return default
    if not low <= value <= high:
        raise UsageError(f"{option} is {value}; give a number from {low} to {high}")
    return value
