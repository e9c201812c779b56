"""Fits as much of a model as possible into a GPU's memory, by trial, before anything loads.

Attention of all layers with its KV cache comes first, then the head, as both are read for every
token; then neurons, the hottest first. The rest stays on the CPU.
"""

from __future__ import annotations

import gc
from dataclasses import replace

from hotcold.actors.attention.cuda.device import GRAPH_BYTES, MAX_GRAPHS, Device
from hotcold.actors.attention.cuda.load import CudaLoading
from hotcold.actors.attention.cuda.prompt import BLOCK_BYTES, far_bytes
from hotcold.actors.protocol.failures import is_out_of_memory
from hotcold.actors.protocol.messages import Fitted, ServiceSpec, SystemConfig
from hotcold.actors.protocol.neuron_bundles import ROUND_BYTES
from hotcold.actors.protocol.step_sizes import KERNEL_TOKENS
from hotcold.actors.setup.account import GpuParts
from hotcold.actors.setup.assignment import system_plan
from hotcold.actors.setup.shards import arena_layout, attention_spec, served_config
from hotcold.model.byte_sizes import binary_text
from hotcold.model.config.model_config import ModelConfig
from hotcold.model.errors import MemoryBudgetError
from hotcold.model.files.artifact import sampled_digest
from hotcold.model.weights.sizes import ffn_bytes
from hotcold.numba_kernels.decode.attention import PAGE_POSITIONS
from hotcold.placement.solver.plan_devices import gpu_budget

# Beside arrays and the context: graphs, kernels' code, a second event, and cuBLAS's workspace.
LATE_BYTES = MAX_GRAPHS * GRAPH_BYTES + (96 << 20) + (32 << 20)
_GIB = 1 << 30


def work_bytes(system: SystemConfig, config: ModelConfig, device: Device) -> int:
    """Bytes of the workspace; `config` has the formats that matrices are loaded in."""
    layout, kernels = arena_layout(system, config), device.kernels
    tokens = layout.max_tokens
    width, qkv, neurons = config.hidden_size, config.most_inputs, config.largest_ffn
    block = max(max(layer.ffn.block_sizes) for layer in config.layers)
    own = 2 * width * (config.experts is not None)  # tokens of one expert, and its output
    prompt = tokens * max(7 * width + 2 * qkv, 3 * width + 7 * block // 2 + own)
    step = KERNEL_TOKENS * (8 * width + 2 * qkv + config.vocab_size)
    blocks = layout.num_blocks * (config.num_layers + 1)  # what they weigh, a router's logits
    step += KERNEL_TOKENS * (blocks + 1)
    step += kernels.ffn_scratch_items(KERNEL_TOKENS, neurons, width)
    step += kernels.attention_scratch_items(
        KERNEL_TOKENS, config.num_heads, config.head_dim, layout.pages_a_slot * PAGE_POSITIONS
    )
    uploaded = 2 * ROUND_BYTES * bool(system.neuron_upload_tokens)
    far = far_bytes(system, config, layout.pages_a_slot * PAGE_POSITIONS)
    return 4 * (prompt + step) + ffn_bytes(config, 0) + BLOCK_BYTES + far + uploaded


def fit_system(
    device: Device, system: SystemConfig, config: ModelConfig
) -> tuple[CudaLoading, Fitted]:
    """Allocate memory for as much of the model as fits, at most a plan's share.

    The budget of `system` (0: free memory less a reserve) is for the whole process, CUDA context
    included.
    Errors:  MemoryBudgetError where nothing fits, CheckpointError, ArtifactError
    """
    free = device.used_bytes() + device.free_bytes()
    budget = gpu_budget(system.gpu_memory_bytes or None, free)
    available = budget - device.used_bytes() - LATE_BYTES
    served = served_config(system, config)
    parts, work = GpuParts.of(system, served), work_bytes(system, served, device)
    wanted = _wanted(system, config)
    guess, less = available, max(available // 20, 16 * parts.neuron, 1)
    while True:
        found = parts.within(guess - work, wanted, config)
        if _is_empty(found, config) and guess == available:
            least = device.used_bytes() + LATE_BYTES + work + parts.layer
            raise MemoryBudgetError(
                f"{binary_text(budget)} of GPU memory hold no layer of this model; give "
                f"--gpu-memory {least / _GIB:.2f}GiB or more, or --device cpu"
            )
        if _is_empty(found, config):
            raise MemoryBudgetError(
                f"{device.name} refused memory for even a part of what {binary_text(budget)} "
                "should hold; end what else uses that GPU, or use --device cpu"
            )
        device.limit(available)
        loading = _try(device, config, attention_spec(found, served))
        if loading is not None:
            note = _note(device, config, wanted, found)
            if found.gpu_predicts:
                digest = sampled_digest(found.predictors_path)
                found = replace(found, predictors_digest=digest)
            return loading, Fitted(found, note, f"cuda ({device.name})")
        gc.collect()
        device.release()
        guess, less = guess - less, 2 * less  # some five attempts at most


def _try(device: Device, config: ModelConfig, spec: ServiceSpec) -> CudaLoading | None:
    """The allocated service, or None if it does not fit."""
    try:
        return CudaLoading(device, config, spec)
    except Exception as error:  # CUDA's and cuBLAS's have no common base with MemoryError
        if not (isinstance(error, MemoryError) or is_out_of_memory(str(error))):
            raise
        return None


def _wanted(system: SystemConfig, config: ModelConfig) -> SystemConfig:
    """What the plan puts on its GPU, or everything."""
    plan = system_plan(system, config)
    if plan is None:
        return replace(system, num_hot_neurons=config.num_neurons)
    num_hot = int((plan.neuron_device == 0).sum()) if plan.num_gpus else 0
    return replace(
        system,
        num_hot_neurons=num_hot,
        num_host_layers=int((plan.attention_device < 0).sum()),
        head_on_host=plan.head_device < 0,
    )


def _is_empty(system: SystemConfig, config: ModelConfig) -> bool:
    """Whether nothing of it is on the GPU."""
    no_layers = system.num_host_layers == config.num_layers and system.head_on_host
    return no_layers and system.num_hot_neurons == 0


def _note(device: Device, config: ModelConfig, wanted: SystemConfig, found: SystemConfig) -> str:
    parts = []
    if wanted.plan_path and found.num_hot_neurons < wanted.num_hot_neurons:
        parts.append(
            f"{found.num_hot_neurons} of the plan's {wanted.num_hot_neurons} hot neurons fit"
        )
    if found.num_host_layers > wanted.num_host_layers:
        parts.append(
            f"attention of {found.num_host_layers} of {config.num_layers} layers stays on the CPU"
        )
    if found.head_on_host > wanted.head_on_host:
        parts.append("the head stays on the CPU")
    return f"{device.name} is short of memory: {', '.join(parts)}" if parts else ""


def open_device() -> Device:
    """The GPU of this process. Errors: RuntimeError, in one line."""
    from hotcold.cuda_kernels.cupy_device import CupyDevice

    return CupyDevice()
