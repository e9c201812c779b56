"""Checks and choices before anything is started, so that mistakes cost no waiting."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hotcold.actors.protocol.messages import LAYER_DRAFT, NO_MODEL, SystemConfig
from hotcold.actors.protocol.offloaded_neurons import NeuronStorage
from hotcold.actors.protocol.options import AUTO_DRAFT, SystemOptions
from hotcold.actors.protocol.ray_memory import free_bytes, monitor_bytes
from hotcold.actors.setup.account import Account, account, require_memory
from hotcold.actors.setup.choose import choose_system
from hotcold.actors.setup.placement_choice import find_plan, own_profile
from hotcold.actors.setup.shards import can_keep_transposed, served_config
from hotcold.actors.setup.storage import fit_storage, has_bundles
from hotcold.model.config.build import read_config
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.config.weight_formats import QUANTIZED_NAMES
from hotcold.model.errors import UsageError
from hotcold.model.files.checkpoint import Checkpoint
from hotcold.model.sampling import eos_ids, suppressed_ids
from hotcold.model.weights.check import check_tensors, stored_config


def prepare_system(
    path: Path, options: SystemOptions, extra_bytes: int = 0
) -> tuple[SystemConfig, ModelConfig]:
    """Check the model's files, the options and the memory; fill in defaults.

    The config's dtype is the one that matrices are loaded in. If the system and `extra_bytes` need
    more than --cpu-memory (of each host), neurons stay on storage.
    Errors:  ConfigError, CheckpointError, UsageError, MemoryBudgetError, ArtifactError
    """
    config = read_model(path, options.weight_dtype)
    system = choose_system(path, config, options)
    has_plan = options.plan is not None
    served = in_memory(system, config, has_plan)
    fits = _fits(path, *served, options, extra_bytes)
    is_chosen = system.draft == LAYER_DRAFT and options.draft == AUTO_DRAFT
    if is_chosen and not (fits and account(*served, False, extra_bytes).total_bytes < free_bytes()):
        system = replace(system, draft=NO_MODEL)
        served = in_memory(system, config, has_plan)
        fits = _fits(path, *served, options, extra_bytes)
    if not fits and system.draft == LAYER_DRAFT:
        raise UsageError(
            f"--draft {LAYER_DRAFT} is for models in memory, and --cpu-memory is less than this "
            "one needs; leave one of them out"
        )
    if not fits and system.neuron_upload_tokens:
        # Upload buffers need memory; offloaded neurons are multiplied where they are read anyway.
        system = replace(system, neuron_upload_tokens=0)
        served = in_memory(system, config, has_plan)
        fits = _fits(path, *served, options, extra_bytes)
    if not fits:
        # Whole experts are read, so their down rows can be as in memory.
        stored = (system, config) if config.experts is None else served
        storage = _storage(path, *stored, options, extra_bytes)
        if storage is not None:
            return replace(stored[0], storage=storage), stored[1]
    system, config = served
    check_memory(path, system, config, options, extra_bytes)
    if system.down_transposed or system.draft == LAYER_DRAFT:
        # No plan applies to services with runs of neurons; none places those of such a layer.
        return system, config
    return replace(system, plan_path=find_plan(path, system, config, options)), config


def in_memory(
    system: SystemConfig, config: ModelConfig, has_plan: bool = False
) -> tuple[SystemConfig, ModelConfig]:
    """`system` with all neurons in memory, and the config with the formats of its matrices.

    `has_plan`: --plan places neurons, so down projections have a row for each neuron.
    Errors:  CheckpointError, UsageError
    """
    keeps = not has_plan and can_keep_transposed(system, config)
    system = replace(system, down_transposed=keeps)
    return system, served_config(system, config)


def _fits(
    path: Path,
    system: SystemConfig,
    config: ModelConfig,
    options: SystemOptions,
    extra_bytes: int,
) -> bool:
    """Whether the system fits in --cpu-memory and in free memory; True without a limit.

    A GPU's overhead beside weights is counted, unless a plan says what it holds.
    """
    limit = options.cpu_memory_bytes
    if limit is None:
        return True
    has_gpu, has_plan = system.device == "cuda", options.plan is not None
    is_sure = has_gpu and not (has_plan or find_plan(path, system, config, options))
    need = account(system, config, is_sure, extra_bytes)
    return need.total_bytes <= min(limit, free_bytes())


def read_model(path: Path, weight_dtype: str | None = None) -> ModelConfig:
    """Check the model's files without reading weights.

    The config's dtype is the one that matrices are loaded in: `weight_dtype`, else as stored.
    Errors:  ConfigError, CheckpointError; UsageError for an unsupported dtype
    """
    config = read_config(path)
    checkpoint = Checkpoint(path)
    check_tensors(checkpoint, config)
    eos_ids(path, config)
    suppressed_ids(path, config.vocab_size)
    return stored_config(checkpoint, config, weight_dtype or "")


def packed_config(path: Path, weight_dtype: str | None = None) -> ModelConfig:
    """`read_model`, with the formats of the bundle file that a system reads by default.

    Errors:  those of `read_model` and `choose_system`
    """
    config = read_model(path, weight_dtype)
    if config.experts is None:
        return config
    system = choose_system(path, config, SystemOptions(weight_dtype=weight_dtype))
    return in_memory(system, config)[1]


def check_memory(
    path: Path, system: SystemConfig, config: ModelConfig, options: SystemOptions, extra_bytes: int
) -> None:
    """Compare the need of the system and `extra_bytes` with the memory that is free or allowed.

    Errors:  MemoryBudgetError, naming the --dtype that fits if there is one
    """
    need = account(system, config, extra_bytes=extra_bytes)
    quantized = quantized_needs(path, options, extra_bytes)
    require_memory(need, options.cpu_memory_bytes, quantized, monitor_bytes())


def _storage(
    path: Path,
    system: SystemConfig,
    config: ModelConfig,
    options: SystemOptions,
    extra_bytes: int,
) -> NeuronStorage | None:
    """How much of the FFN --cpu-memory leaves in memory; None where offloading is not possible."""
    assert options.cpu_memory_bytes is not None
    free = min(options.cpu_memory_bytes, free_bytes())
    found = fit_storage(own_profile(path, config), system, config, free, extra_bytes)
    if found is None:
        return None
    if options.plan is not None:
        raise UsageError("--plan places neurons in memory; leave it out, or give more --cpu-memory")
    has_bundles(path, config)
    return found


def smaller_dtypes(path: Path) -> Iterator[tuple[str, ModelConfig]]:
    """Each smaller --dtype that a model can be loaded with, the most precise first."""
    casts = ("f16",) if read_model(path).dtype == "float32" else ()
    for dtype in (*casts, *QUANTIZED_NAMES):
        try:
            config = read_model(path, dtype)
        except UsageError:  # rows that are no whole groups, or a quantized checkpoint
            continue
        yield dtype, config


def quantized_needs(
    path: Path, options: SystemOptions, extra_bytes: int = 0
) -> Iterator[tuple[str, Account]]:
    """The memory need with each of `smaller_dtypes`."""
    for dtype, config in smaller_dtypes(path):
        with suppress(UsageError):  # a draft of as many bits
            system = choose_system(path, config, replace(options, weight_dtype=dtype))
            yield dtype, account(system, config, extra_bytes=extra_bytes)
